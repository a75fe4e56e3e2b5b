"""Optimizers of optax for variables with overwritten leaves."""

try:
    import optax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fp8_jax_owg.optax needs {error.name}, which is not installed. Run: pip install 'fp8-jax-owg[optax]'",
        name=error.name,
    ) from None

from fp8_jax_owg.optax._bypass import bypass_owg
from fp8_jax_owg.optax._multi_steps import MultiSteps, MultiStepsState

__all__ = ["MultiSteps", "MultiStepsState", "bypass_owg"]
