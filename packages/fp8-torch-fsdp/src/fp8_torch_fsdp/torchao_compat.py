"""Helpers of torchao.float8 that programs import, under their names there, with the numbers of torchao's scales.

    from fp8_torch_fsdp.torchao_compat import compute_error, hp_tensor_to_float8_dynamic

What has no counterpart here stands in the guide, with what to use instead.
"""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import Format, Fp8Error
from fp8_common.presets import torchao
from fp8_common.torch import FLOAT8_DTYPES, amax, amax_to_scale, dequantize, quantize
from fp8_common.torch.plugin import max_over_ranks
from fp8_torch_fsdp._config import Float8LinearConfig
from fp8_torch_fsdp._convert import convert_to_float8_training

__all__ = ["Float8Values", "compute_error", "float8_linear_from_float", "hp_tensor_to_float8_dynamic"]


class Float8Values(NamedTuple):
    """A tensor in FP8.

    Attributes:
        data: float8 codes, in the shape of the original.
        scale: float32, a scalar or with 1 along `axiswise_dim`; what the values were multiplied by.
        orig_dtype: The dtype of the original.
    """

    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype

    def to_original_precision(self) -> torch.Tensor:
        """Return the values that the codes stand for, in the original dtype."""
        return dequantize(self.data, self.scale, _format(self.data.dtype), self.orig_dtype)


def hp_tensor_to_float8_dynamic(
    hp_tensor: torch.Tensor,
    float8_dtype: torch.dtype,
    *,
    reduce_amax: bool = False,
    device_mesh: dist.DeviceMesh | None = None,
    scaling_granularity: Literal["tensorwise", "axiswise"] = "tensorwise",
    axiswise_dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> Float8Values:
    """Cast a tensor with a scale of its own amax, as torchao's function of this name does.

    Args:
        hp_tensor: float32, bfloat16 or float16.
        float8_dtype: A float8 dtype, for example `torch.float8_e4m3fn`.
        reduce_amax: Combine a tensorwise amax over all ranks, or over those of `device_mesh`, which all call this.
        device_mesh: A mesh of one dimension.
        scaling_granularity: "tensorwise", or "axiswise" with a scale for each slice along `axiswise_dim`.
        axiswise_dim: The dimension that a scale spans, the contracted one.
        round_scales_to_power_of_2: Round scales down to powers of two, exactly.

    Raises:
        Fp8Error: An unknown dtype, or a granularity that does not go with the other arguments.
    """
    # Each granularity with its own argument: an axis without "axiswise" would be ignored without a word.
    axiswise = scaling_granularity == "axiswise"
    if scaling_granularity not in ("tensorwise", "axiswise") or axiswise != (axiswise_dim is not None):
        raise Fp8Error(
            f'scaling_granularity must be "tensorwise", or "axiswise" with axiswise_dim; got {scaling_granularity!r} '
            f"and axiswise_dim={axiswise_dim!r}."
        )
    largest = amax(hp_tensor, axis=axiswise_dim, keepdims=axiswise)
    if reduce_amax and not axiswise:
        group = dist.group.WORLD if device_mesh is None else device_mesh.get_group()
        # as integers, whose order is the same: gloo's MAX of floats loses a NaN of some ranks
        (keys,), _ = max_over_ranks([largest.view(torch.int32)], group)
        largest = keys.view(torch.float32)
    fmt = _format(float8_dtype)
    scale = amax_to_scale(largest, fmt, torchao(power_of_2=round_scales_to_power_of_2))
    return Float8Values(quantize(hp_tensor, scale, fmt), scale, hp_tensor.dtype)


def compute_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the signal-to-noise ratio of `y` against the original `x` in dB, 20 log10(|x| / |x - y|)."""
    return 20 * torch.log10(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(x - y))


def float8_linear_from_float(mod: nn.Linear, config: Float8LinearConfig | None = None) -> nn.Module:
    """Return the FP8 layer of one linear layer: what `Float8Linear.from_float` is there.

    Raises:
        Fp8Error: `mod` is no `nn.Linear` that can be converted.
    """
    return convert_to_float8_training(mod, config=config)


def _format(dtype: torch.dtype) -> Format:
    fmt = FLOAT8_DTYPES.get(dtype)
    if fmt is None or fmt.name == "e8m0":
        raise Fp8Error(f"float8_dtype must be a float8 dtype with a sign, got {dtype}. Use torch.float8_e4m3fn.")
    return fmt
