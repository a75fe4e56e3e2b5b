"""`GatheredWeight`: an FP8 weight after the all-gather.

FP8 layers read its codes; any other operator gets the dequantized values, so that custom layers work too. The functions
below `WeightMemory` connect the weight of a forward with its backward.
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
"""Operators that autograd and FSDP2 run on a weight without reading its values."""

_MULTIPLIES = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default),
    *(aten.mm.default, aten.mv.default, aten.addmm.default, aten.bmm.default, aten.linear.default),
}
"""The first operators of `F.linear(x, layer.weight)`, `x @ layer.weight.T` and `torch.einsum`."""


class Origin(Protocol):
    """Identity of gathered codes, shared by all views of the weight.

    Attributes:
        number: Number of the codes that the buffer holds now. It changes if another forward replaces the codes.
        mark: The same number as an int64 scalar on the CPU, which autograd can save.
    """

    number: int
    mark: torch.Tensor


class GatheredWeight(torch.Tensor):
    """A gathered weight as FP8 codes with scales.

    FP8 layers read the codes; any other operator gets the dequantized values. Operators that write to the tensor raise
    RuntimeError. Tensor parallelism also gathers activations and gradients in this form. Plugins export the class for
    `isinstance` alone.

    Args:
        codes: float8 [rows, columns], contiguous; or a stack of such matrices.
        scale_inv: Scales back from FP8: a float32 scalar, float32 [rows, 1], float32 with one scale per block, or
            uint8 with the E8M0 codes of MX blocks. It is not copied, so a gather that refills it updates this tensor.
        fmt: Short name of the format.
        dtype: dtype that the tensor reports, of its values and its gradient. For weights it is the compute dtype of
            FSDP2's mixed precision.
        block: Elements per scale, if scales do not broadcast.
        origin: Identifies the codes in the buffer; None if they never change.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: str
    block: tuple[int, int] | None
    origin: "Origin | None"
    is_weight = True
    """Whether to warn of matmuls outside of an FP8 layer."""

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
        """Return the values in the dtype of this tensor.

        They are the codes times `scale_inv`, computed in float32 and rounded once.
        """
        if self.scale_inv.dtype == torch.uint8:
            return decoding.dequantize_mx(self.codes, self.scale_inv, get_format(self.fmt), self.dtype)
        return decoding.dequantize(self.codes, self.scale_inv, get_format(self.fmt), self.dtype, self.block)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the values; torch would export an invalid address."""
        return self.dequantize().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array; torch does not support subclasses."""
        return self.dequantize().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return shape, format and dtype. FSDP2 may have freed the values."""
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
        """Return a hash of the metadata, for caches of compiled graphs.

        It is the same in every process.
        """
        return stable_hash(self, self.scale_inv, self.fmt, self.block)

    # Python functions of torch run as for any tensor; only the operators that they call reach `__torch_dispatch__`.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Keep codes in FSDP2's views; dequantize for everything else."""
        kwargs = kwargs or {}
        if func in _KEEPS_CODES:
            weight = args[0]
            codes = func(weight.codes, *args[1:], **kwargs)
            # Scales of rows and blocks belong to one shape: views of another shape are views of the values.
            if weight.scale_inv.ndim == 0 or (codes.shape, codes.stride()) == (weight.shape, weight.stride()):
                return type(weight)(codes, weight.scale_inv, weight.fmt, weight.dtype, weight.block, weight.origin)
        if any(isinstance(written, GatheredWeight) for written in written_tensors(func, args, kwargs)):
            raise RuntimeError(
                f"{func} would write to a gathered FP8 weight, which holds rounded codes that the next all-gather "
                "replaces. Change the sharded parameter instead (after model.reshard())."
            )
        # No warning for stacks, which have no layer that multiplies their codes.
        weights = [argument for argument in args if isinstance(argument, GatheredWeight)]
        if func in _MULTIPLIES and all(argument.is_weight and argument.ndim <= 2 for argument in weights):
            warnings.warn(
                "An FP8 weight is multiplied outside of its layer: in high precision, with values that were rounded to "
                "FP8 for the gather. Call the layer, or leave it out of the conversion with module_filter_fn.",
                stacklevel=2,
            )
        args, kwargs = pytree.tree_map_only(GatheredWeight, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


# `torch.load(weights_only=True)` accepts only registered classes.
torch.serialization.add_safe_globals([GatheredWeight])


def quantized(gathered: GatheredWeight) -> Quantized:
    """Return codes and scales of a gathered weight as an operand."""
    # Not a method: compilers trace methods of tensor subclasses as operators, which must return tensors.
    scale_inv = gathered.scale_inv
    if scale_inv.dtype == torch.uint8:
        scale_inv = scale_inv_of_e8m0(scale_inv)
    elif not torch.compiler.is_compiling() and scale_inv.ndim == 0 and scale_inv.storage_offset() % 4:
        # A view into the scales of all weights. cuBLAS requires an aligned address; compiled code copies the scalar.
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
    """Implement FSDP2's `fsdp_post_all_gather` for an FP8 weight.

    Args:
        buffer: uint8, the codes of all ranks, which may be padded at the end. FSDP2 refills it in place.
        scale_inv: Scales of the whole weight, as in `GatheredWeight`. They are not copied.
        grid: Layout of the scales.
        full_shape: Shape of the weight.
        dtype: dtype that the weight reports.
        origin: Identifies the codes in the buffer; None if they never change.
        out: Result of an earlier gather of this weight, or a DTensor of it; None in the first gather.

    Returns:
        The weight, and the tensors besides `buffer` that FSDP2 frees when it reshards (none). None if `out` is given:
        it is updated in place.
    """
    target: Any = out if isinstance(out, GatheredWeight) else local_of(out)
    if target is not None:
        target.scale_inv = scale_inv  # The codes alias the buffer, which FSDP2 has refilled.
        return None
    fmt = grid.cast.fp8_format
    codes = unpad(buffer, full_shape, torch_dtype(fmt))
    return GatheredWeight(codes, scale_inv, fmt.name, dtype, grid.tile, origin), ()


# ---------------------------------------------------------------- between forward and backward


class WeightMemory(NamedTuple):
    """Metadata of a forward's weight that its backward needs, besides tensors.

    Attributes:
        turned: Whether the saved codes are transposed, as the gradient of the input contracts them.
        form: Format and block of the saved codes; None if none were saved.
        origin: Identifies the codes that FSDP2 holds; None for other weights.
        number: Number of the codes in the forward; 0 without `origin`.
    """

    turned: bool
    form: tuple | None
    origin: Any
    number: int


def save_weight(
    weight: torch.Tensor, operand: Quantized | None, *, needed: bool, keep: bool, compiled: bool
) -> tuple[tuple[torch.Tensor | None, ...], WeightMemory]:
    """Return a weight's tensors and metadata to save for the backward.

    Args:
        weight: The weight in any state: a plain parameter, a part or a `GatheredWeight`.
        operand: Operand of the forward; None if its codes are not saved.
        needed: Whether the backward multiplies by the weight.
        keep: Whether to save the codes of the forward.
        compiled: Whether a compiler traces the forward.

    Returns:
        Three tensors, the `mark` of the origin, codes, and scales back from FP8, each of which may be None; and the
        metadata.
    """
    saved = operand if needed and keep else None
    turned = None if saved is None else saved.transposed  # The backward contracts the transposed codes.
    # Compiled code cannot compare numbers; it relies on the hooks of FSDP2, which restore the codes of this forward.
    origin = getattr(weight, "origin", None) if needed and not compiled else None
    tensors, form = save_operand(saved if turned is None else turned)
    memory = WeightMemory(turned is not None, form, origin, 0 if origin is None else origin.number)
    return (None if origin is None else origin.mark, *tensors), memory


def restore_weight(memory: WeightMemory, tensors: Sequence[torch.Tensor | None], name: str) -> Quantized | None:
    """Return the codes that `save_weight` saved for the backward, or None.

    Args:
        memory: Metadata that `save_weight` returned.
        tensors: The three tensors that `save_weight` returned.
        name: Name of the layer in the error.

    Raises:
        Fp8StaleError: If FSDP2 holds other codes than the forward used.
    """
    mark, codes, scale_inv = tensors
    if mark is not None:
        check_codes(memory, int(mark), name)
    return None if codes is None or scale_inv is None else Quantized(codes, scale_inv, *(memory.form or ()))


def check_codes(memory: WeightMemory, repeated: int, name: str) -> None:
    """Compare the codes that FSDP2 holds with the codes of the forward.

    Args:
        memory: Metadata of the weight.
        repeated: Number of the codes in the repeated forward of a checkpoint; without checkpoint, in the forward.
        name: Name of the layer in the error.

    Raises:
        Fp8StaleError: If the numbers of the codes differ.
    """
    number, current = memory.number, memory.origin.number
    if number == repeated == current:
        return
    raise Fp8StaleError(
        f"The backward of {name} would multiply with FP8 codes {current} of its weight, and its forward used codes "
        f"{number}{'' if repeated == number else f' ({repeated} when it was repeated)'}: another forward ran between "
        "the two, and the codes of this one are gone. Return the outputs of modules under fully_shard in tuples, lists "
        "or dicts, so that FSDP2 sees their backward, or run the backward first."
    )


def save_operand(saved: torch.Tensor | Quantized | None) -> tuple[tuple[torch.Tensor | None, ...], tuple | None]:
    """Split an operand into two tensors, codes and scales, and its metadata.

    A plain tensor, or None, is returned as the first of the two, without metadata.
    """
    if isinstance(saved, Quantized):
        return (saved.codes, saved.scale_inv), (saved.fmt, saved.block)
    return (saved, None), None


def restore_operand(
    saved: torch.Tensor, scale_inv: torch.Tensor | None, form: tuple | None
) -> torch.Tensor | Quantized:
    """Join the results of `save_operand` to the operand or plain tensor."""
    return saved if scale_inv is None else Quantized(saved, scale_inv, *(form or ()))
