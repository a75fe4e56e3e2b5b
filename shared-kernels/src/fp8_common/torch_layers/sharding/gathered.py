"""`GatheredWeight`: an FP8 weight after the all-gather.

FP8 layers read its codes; any other operator gets the dequantized values, so that custom layers work too.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch

from fp8_common.errors import Fp8StaleError
from fp8_common.formats import FORMATS, get_format
from fp8_common.torch import decoding
from fp8_common.torch.compat import (
    OpOverload,
    disabled_torch_function,
    local_of,
    pytree,
    stable_hash,
    wrapper_of,
    written_tensors,
)
from fp8_common.torch.numerics import scale_inv_of_e8m0, torch_dtype
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.fsdp import unpad
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid

aten = torch.ops.aten

_KEEPS_CODES = {
    aten.detach.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.view.default,
    aten._unsafe_view.default,
}
"""Operators of autograd and FSDP2 on a weight that do not read it."""

_MULTIPLIES = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
    *(aten.mm.default, aten.mv.default, aten.addmm.default, aten.bmm.default, aten.linear.default),
}
"""First operators of `F.linear(x, layer.weight)`, `x @ layer.weight.T` and `torch.einsum`."""


class Origin(Protocol):
    """Source of the gathered codes, shared by all views.

    Attributes:
        number: Number of the codes in the buffer; another forward may have replaced them.
        mark: The same as an int64 scalar on the CPU, which autograd saves.
    """

    number: int
    mark: torch.Tensor


class GatheredWeight(torch.Tensor):
    """The whole weight as FP8 codes with scales.

    Reports `dtype`, the dtype of its gradient.

    Tensor parallelism gathers activations and gradients in this form too.

    Args:
        codes: float8 [rows, columns], contiguous.
        scale_inv: float32 back from FP8: a scalar, [rows, 1], or one for each block; or uint8, the E8M0 codes of MX
            blocks. It is not copied: a gather that refills it refills this one.
        fmt: Short name of the format.
        dtype: The dtype that the weight stands for (the compute dtype of FSDP2's mixed precision).
        block: The block of each scale, where scales do not broadcast.
        origin: Identifies the codes in the buffer; None if they never change.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: str
    block: tuple[int, int] | None
    origin: "Origin | None"
    is_weight = True
    """Whether a matmul outside of its layer is a mistake."""

    @staticmethod
    def __new__(
        cls: type[Self],
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
        fmt: str,
        dtype: torch.dtype,
        block: tuple[int, int] | None = None,
        origin: "Origin | None" = None,
    ) -> Self:
        """Wrap codes and scales without copying them."""
        self = wrapper_of(cls, codes, dtype=dtype)
        self.codes, self.scale_inv, self.fmt, self.block, self.origin = codes, scale_inv, fmt, block, origin
        return self

    def dequantize(self) -> torch.Tensor:
        """Return the values, of this shape and dtype.

        float32 codes times `scale_inv`, rounded to it.
        """
        if self.scale_inv.dtype == torch.uint8:
            return decoding.dequantize_mx(self.codes, self.scale_inv, get_format(self.fmt), self.dtype)
        return decoding.dequantize(self.codes, self.scale_inv, get_format(self.fmt), self.dtype, self.block)

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
        return f"GatheredWeight(shape={tuple(self.shape)}, fmt={self.fmt!r}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        """Expose codes and scales to the compiler."""
        return ["codes", "scale_inv"], (self.fmt, self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "GatheredWeight":
        """Rebuild from `__tensor_flatten__`."""
        return GatheredWeight(inner["codes"], inner["scale_inv"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Return a compiled graph's dependences besides values.

        The same in every process.
        """
        return stable_hash(self, self.scale_inv, self.fmt, self.block)

    # Python functions of torch run as for any tensor; only the operators that they end in come to `__torch_dispatch__`.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Keep codes in FSDP2's views; dequantize for everything else."""
        kwargs = kwargs or {}
        if func in _KEEPS_CODES:
            weight = args[0]
            codes = func(weight.codes, *args[1:], **kwargs)
            # scales of rows and blocks, a single one too, lie on one shape alone: a view of another one is of values
            if weight.scale_inv.ndim == 0 or (codes.shape, codes.stride()) == (weight.shape, weight.stride()):
                return type(weight)(codes, weight.scale_inv, weight.fmt, weight.dtype, weight.block, weight.origin)
        if any(isinstance(written, GatheredWeight) for written in written_tensors(func, args, kwargs)):
            raise RuntimeError(
                f"{func} would write to a gathered FP8 weight, which holds rounded codes that the next all-gather "
                "replaces. Change the sharded parameter instead (after model.reshard())."
            )
        # Stacked weights have no layer that multiplies codes.
        weights = [argument for argument in args if isinstance(argument, GatheredWeight)]
        if func in _MULTIPLIES and all(argument.is_weight and argument.ndim <= 2 for argument in weights):
            warnings.warn(
                "An FP8 weight is multiplied outside of its layer: in high precision, with values that were rounded to "
                "FP8 for the gather. Call the layer, or leave it out of the conversion with module_filter_fn.",
                stacklevel=2,
            )
        args, kwargs = pytree.tree_map_only(GatheredWeight, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


# `torch.load` with weights_only=True accepts only classes that are listed here.
torch.serialization.add_safe_globals([GatheredWeight])


def quantized(gathered: GatheredWeight) -> Quantized:
    """Return codes and scales of a gathered weight as an operand."""
    # no method: compilers trace methods of tensor subclasses as operators, which return tensors
    scale_inv = gathered.scale_inv
    if scale_inv.dtype == torch.uint8:
        scale_inv = scale_inv_of_e8m0(scale_inv)
    elif not torch.compiler.is_compiling() and scale_inv.ndim == 0 and scale_inv.storage_offset() % 4:
        # a view of all weights' scales: cuBLAS does not accept a scalar at an odd address, compilers copy it
        scale_inv = scale_inv.clone()
    return Quantized(gathered.codes, scale_inv, FORMATS[gathered.fmt], gathered.block)


def finish_gather(
    buffer: torch.Tensor,
    scale_inv: torch.Tensor,
    grid: ScaleGrid,
    full_shape: torch.Size,
    dtype: torch.dtype,
    *,
    origin: Origin | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Run `fsdp_post_all_gather` of FSDP2 for the gathered tensors of an FP8 weight.

    Args:
        buffer: uint8, the codes of all ranks, which may be padded at the end; FSDP2 refills it in place.
        scale_inv: Scales of the whole weight as of `GatheredWeight`, shared with the gathered one.
        grid: Where the scales lie.
        full_shape: Shape of the weight.
        dtype: The dtype that it stands for.
        origin: As of `GatheredWeight`.
        out: Result of an earlier gather of this weight, or a DTensor of it; None the first time.

    Returns:
        The weight, and the tensors that FSDP2 frees when it reshards, besides `buffer`; None if `out` is updated
        instead.
    """
    target: Any = out if isinstance(out, GatheredWeight) else local_of(out)
    if target is not None:
        target.scale_inv = scale_inv  # the codes alias the buffer
        return None
    fmt = grid.cast.fp8_format
    codes = unpad(buffer, full_shape, torch_dtype(fmt))
    return GatheredWeight(codes, scale_inv, fmt.name, dtype, grid.tile, origin), ()


# ---------------------------------------------------------------- between forward and backward


class WeightMemory(NamedTuple):
    """A backward's metadata of a forward's weight, besides tensors.

    Attributes:
        turned: Whether the codes lie as the gradient of the input contracts them.
        form: Format and block of the codes; None if they were not kept.
        origin: Identifies the codes that FSDP2 holds; None for other weights.
        number: Number of the codes in the forward.
    """

    turned: bool
    form: tuple | None
    origin: Any
    number: int


def remember(
    weight: torch.Tensor, operand: Quantized | None, *, needed: bool, keep: bool, compiled: bool
) -> tuple[tuple[torch.Tensor | None, ...], WeightMemory]:
    """Return a weight's three tensors for the backward, and metadata.

    Any of the tensors may be None.

    Args:
        weight: The weight, in any state.
        operand: The operand of the forward; None if its codes are not kept.
        needed: Whether the backward multiplies with it.
        keep: Whether it takes the codes of the forward.
        compiled: Whether a compiler traces the forward.
    """
    kept = operand if needed and keep else None
    turned = None if kept is None else kept.transposed  # the codes that the backward contracts
    # Compiled code cannot compare: there only the hooks of FSDP2 restore the codes of this forward.
    origin = getattr(weight, "origin", None) if needed and not compiled else None
    tensors, form = apart(kept if turned is None else turned)
    memory = WeightMemory(turned is not None, form, origin, 0 if origin is None else origin.number)
    return (None if origin is None else origin.mark, *tensors), memory


def recall(memory: WeightMemory, tensors: Sequence[torch.Tensor | None], name: str) -> Quantized | None:
    """Return the codes kept for the backward, or None.

    Raises:
        Fp8StaleError: FSDP2 holds other codes now than the forward used.
    """
    mark, codes, scale_inv = tensors
    if mark is not None:
        check_codes(memory, int(mark), name)
    return None if codes is None or scale_inv is None else Quantized(codes, scale_inv, *(memory.form or ()))


def check_codes(memory: WeightMemory, repeated: int, name: str) -> None:
    """Compare FSDP2's current codes with the forward's.

    Args:
        memory: Of the weight.
        repeated: Number of the codes in the forward, or where a checkpoint has repeated it.
        name: The layer's name in the error.

    Raises:
        Fp8StaleError: They are others.
    """
    number, present = memory.number, memory.origin.number
    if number == repeated == present:
        return
    raise Fp8StaleError(
        f"The backward of {name} would multiply with FP8 codes {present} of its weight, and its forward used codes "
        f"{number}{'' if repeated == number else f' ({repeated} when it was repeated)'}: another forward ran between "
        "the two, and the codes of this one are gone. Return the outputs of modules under fully_shard in tuples, lists "
        "or dicts, so that FSDP2 sees their backward, or run the backward first."
    )


def apart(saved: torch.Tensor | Quantized | None) -> tuple[tuple[torch.Tensor | None, ...], tuple | None]:
    """Return an operand's two tensors and its metadata.

    A plain tensor is the first of the two.
    """
    if isinstance(saved, Quantized):
        return (saved.codes, saved.scale_inv), (saved.fmt, saved.block)
    return (saved, None), None


def together(saved: torch.Tensor, scale_inv: torch.Tensor | None, form: tuple | None) -> torch.Tensor | Quantized:
    """Undo `apart`."""
    return saved if scale_inv is None else Quantized(saved, scale_inv, *(form or ()))
