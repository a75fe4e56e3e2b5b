"""FP8 for Equinox: its linear layer, the conversion of models, gradients and updates of them."""

try:
    import equinox  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fp8_jax_owg.equinox needs {error.name}, which is not installed. Run: pip install 'fp8-jax-owg[equinox]'",
        name=error.name,
    ) from None

from fp8_jax_owg.equinox._layers import Fp8Linear, convert_to_fp8
from fp8_jax_owg.equinox._transforms import apply_updates, filter_grad, filter_value_and_grad

__all__ = ["Fp8Linear", "apply_updates", "convert_to_fp8", "filter_grad", "filter_value_and_grad"]
