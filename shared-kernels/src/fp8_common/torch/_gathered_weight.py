"""`GatheredFloat8Weight`: an FP8 linear weight after the all-gather, codes and scales that act as a weight.

FP8 layers read its codes; any other operator gets the dequantized values, so that custom layers work too.
"""

import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8_common._blocks import Block
from fp8_common._formats import get_format
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._tensor_subclass import stable_hash, written_tensors

aten = torch.ops.aten

# What autograd and FSDP2 do to a weight without looking into it.
_KEEPS_CODES = {
    aten.detach.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.view.default,
    aten._unsafe_view.default,
}


# What `F.linear(x, layer.weight)`, `x @ layer.weight.T` and `torch.einsum` begin with.
_MULTIPLIES = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
    *(aten.mm.default, aten.mv.default, aten.addmm.default, aten.bmm.default, aten.linear.default),
}


class GatheredFloat8Weight(torch.Tensor):
    """The whole weight as FP8 codes with its scales; reports `dtype` as the dtype of its gradient.

    Tensor parallelism gathers activations and gradients in this form too.

    Args:
        codes: float8 [rows, columns], contiguous.
        scale: float32 that multiplied the weight into FP8: a scalar, [rows, 1], or one for each block.
        fmt: Short name of the format.
        dtype: The dtype that the weight stands for (the compute dtype of FSDP2's mixed precision).
        block: The block of each scale, where scales do not broadcast.

    Attributes:
        filled_from: The tensor that `scale` is a copy of, so that FSDP2's next gather need not copy it again; None if
            it came with the gather.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    fmt: str
    block: Block | None
    filled_from: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type, codes: torch.Tensor, scale: torch.Tensor, fmt: str, dtype: torch.dtype, block: Block | None = None
    ) -> "GatheredFloat8Weight":
        """Wrap codes and scales without copying them."""
        # A tensor without memory of its own: shape, strides and dtype are what autograd and FSDP2 see of it.
        self = torch.Tensor._make_wrapper_subclass(
            cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device
        )
        self.codes, self.scale, self.fmt, self.block = codes, scale, fmt, block
        self.filled_from = None
        return self

    def dequantize(self) -> torch.Tensor:
        """Return the values in this tensor's dtype: codes times RN32(1 / scale)."""
        return dispatch.dequantize(self.codes, self.scale, get_format(self.fmt), self.dtype, self.block)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the values; torch would export an address that is none."""
        return self.dequantize().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array; torch has none for subclasses."""
        return self.dequantize().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show shape and format; the values may be freed."""
        return f"GatheredFloat8Weight(shape={tuple(self.shape)}, fmt={self.fmt!r}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        """Expose codes and scales to the compiler."""
        return ["codes", "scale"], (self.fmt, self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "GatheredFloat8Weight":
        """Rebuild from `__tensor_flatten__`."""
        return GatheredFloat8Weight(inner["codes"], inner["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Name what a compiled graph depends on besides the values: the same in every process."""
        return stable_hash(self, self.scale, self.fmt, self.block)

    # Python functions of torch run as for any tensor; only the operators that they end in come to `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Keep codes under views that FSDP2 takes; run everything else on dequantized values."""
        kwargs = kwargs or {}
        if func in _KEEPS_CODES:
            weight = args[0]
            codes = func(weight.codes, *args[1:], **kwargs)
            # scales of rows and blocks, a single one too, lie on one shape alone: a view of another one is of values
            if weight.scale.ndim == 0 or (codes.shape, codes.stride()) == (weight.shape, weight.stride()):
                return cls(codes, weight.scale, weight.fmt, weight.dtype, weight.block)
        if any(isinstance(written, cls) for written in written_tensors(func, args, kwargs)):
            raise RuntimeError(
                f"{func} would write to a gathered FP8 weight, which holds rounded codes that the next all-gather "
                "replaces. Change the sharded parameter instead (after model.reshard())."
            )
        # Stacked weights have no layer that multiplies codes.
        if func in _MULTIPLIES and not any(isinstance(one, cls) and one.ndim > 2 for one in args):
            warnings.warn(
                "An FP8 weight is multiplied outside of its layer: in high precision, with values that were rounded to "
                "FP8 for the gather. Call the layer, or leave it out of the conversion with module_filter_fn.",
                stacklevel=2,
            )
        args, kwargs = pytree.tree_map_only(cls, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


# `torch.load` with weights_only=True takes no classes but those that are named here.
torch.serialization.add_safe_globals([GatheredFloat8Weight])
