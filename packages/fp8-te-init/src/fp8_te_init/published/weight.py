"""`PublishedWeight`: a weight on FP8 codes and scales of a file.

The weight keeps the scales back from FP8 of the file, not their reciprocals: 17 % of all float32 numbers are not the
reciprocal of any float32 number. An operator that reads a view decodes only the rows of the view. A matmul saves the
codes for its backward, which decodes again. Views and copies keep codes. Writes raise, because the codes belong to the
file.
"""

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.formats import FORMATS
from fp8_common.torch import decoding
from fp8_common.torch.blocks import Block
from fp8_common.torch.compat import (
    OpOverload,
    disabled_torch_function,
    is_view,
    local_of,
    pytree,
    wrapper_of,
    written_tensors,
)
from fp8_common.torch.numerics import scale_inv_of_e8m0
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.fsdp import pad_rows, unpad

aten = torch.ops.aten

E4M3 = FORMATS["e4m3"]
CODES = torch.float8_e4m3fn

_COPIES = {aten.clone.default, aten.empty_like.default, aten._pin_memory.default, aten._to_copy.default}


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class Stored:
    """Storage that all views of a weight share.

    Attributes:
        codes: uint8 [n, columns] or [n experts, rows, columns]: the local part, with padding at its end.
        scale_inv: Scales of the whole weight back from FP8: [], [..., rows, 1] or [..., blocks of rows, blocks of
            columns]. They have the file's dtype, and uint8 instead of E8M0, which fewer operators support.
        block: Elements that share a scale: None for all, (1, 0) for a row, (128, 128) for a block.
        shape: Shape of the whole weight.
        first: Index of the first row, or expert, held here.
        dtype: High-precision dtype of the weight: float32, bfloat16 or float16.
        rows_of_one_scale: Number of consecutive rows whose scales must be equal: the rows of a matrix, if the file has
            one scale for each matrix of a stack. `block` is (1, 0) then. 1 otherwise.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    block: Block
    shape: torch.Size
    first: int
    dtype: torch.dtype
    rows_of_one_scale: int = 1

    @property
    def length(self) -> int:
        """Number of local rows, or experts, without padding."""
        return max(0, min(len(self.codes), self.shape[0] - self.first))

    def with_codes(self, codes: torch.Tensor, **changes: Any) -> "Stored":
        """Return a copy with other codes, and with scales on their device."""
        scale_inv = self.scale_inv
        if codes.device != scale_inv.device:
            scale_inv = _moved(scale_inv, codes.device)
        return dataclasses.replace(self, codes=codes, **({"scale_inv": scale_inv} | changes))

    def values(self, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        """Return decoded local rows, or experts, [low, high) in `dtype`."""
        high = min(high, self.length)
        if self.codes.ndim == 2:
            return _decode(self.codes[low:high], self.scale_inv, self.block, self.first + low, dtype)
        experts = [
            _decode(self.codes[place], self.scale_inv[self.first + place], self.block, 0, dtype)
            for place in range(low, high)
        ]
        return torch.stack(experts) if len(experts) > 1 else experts[0][None]


class PublishedWeight(torch.Tensor):
    """Weight [rows, columns] or stack [experts, rows, columns] on a file's codes.

    `convert_published` creates it, frozen. Its dtype is a high-precision dtype: operators read decoded values, and
    writes raise.

    Args:
        codes: uint8 view of `stored.codes`.
        stored: Storage that is shared with other views.
    """

    # Slots: copying `vars(parameter)` to another parameter must not keep codes alive.
    __slots__ = ("_codes", "_stored")
    _codes: torch.Tensor
    _stored: Stored

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, stored: Stored) -> "PublishedWeight":
        """Wrap codes without copying them."""
        self = wrapper_of(cls, codes, dtype=stored.dtype)
        self._codes, self._stored = codes, stored
        return self

    @staticmethod
    def empty(like: torch.Tensor, **known: Any) -> "PublishedWeight":
        """Return a weight with uninitialized codes, like a parameter.

        Args:
            like: The parameter.
            **known: `scale_inv`, `block` and `rows_of_one_scale` of `Stored`.
        """
        codes = torch.empty(like.shape, dtype=torch.uint8, device=like.device)
        return PublishedWeight(codes, Stored(codes=codes, shape=like.shape, first=0, dtype=like.dtype, **known))

    @property
    def stored(self) -> Stored:
        """Storage that all views of the weight share."""
        return self._stored

    @property
    def codes(self) -> torch.Tensor:
        """Codes of this view as float8_e4m3fn; shares memory."""
        return self._codes.view(CODES)

    @property
    def scale_inv(self) -> torch.Tensor:
        """Scales of the whole weight back from FP8; see `Stored`."""
        return self._stored.scale_inv

    @property
    def nbytes(self) -> int:  # pyrefly: ignore[bad-override]
        """Bytes of the codes."""
        return self._codes.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the values: codes times scales in float32, rounded once to `dtype`."""
        codes, base = self._codes, self._stored.codes
        if codes.is_meta or not codes.numel():
            return torch.zeros(codes.shape, dtype=self.dtype, device=codes.device)
        offset = int(codes.storage_offset() - base.storage_offset())
        unit = math.prod(base.shape[1:])
        reach = sum((size - 1) * stride for size, stride in zip(codes.shape, codes.stride(), strict=True))
        low, high = offset // unit, (offset + reach) // unit + 1
        values = self._stored.values(low, high, self.dtype)
        return values.as_strided(codes.shape, codes.stride(), offset - low * unit)

    def standing_for(self, dtype: torch.dtype, device: torch.device | None = None) -> "PublishedWeight":
        """Return the weight with another dtype, or on another device.

        The codes are shared, and copied only to another device.
        """
        stored, codes = self._stored, self._codes
        if device is None or device == codes.device:
            return PublishedWeight(codes, stored.with_codes(stored.codes, dtype=dtype))
        fresh = stored.with_codes(_moved(stored.codes, device), dtype=dtype)
        offset = codes.storage_offset() - stored.codes.storage_offset()
        return PublishedWeight(fresh.codes.as_strided(codes.shape, codes.stride(), offset), fresh)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show shape, dtype and scales."""
        scales = f"{tuple(self.scale_inv.shape)} scales of {self.scale_inv.dtype}"
        return f"PublishedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, {scales})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Copy codes and scales, which are a buffer of the layer, too."""
        if id(self) not in memo:
            stored = self._stored
            scale_inv = copy.deepcopy(stored.scale_inv, memo)  # with the memo, as the buffer
            fresh = dataclasses.replace(stored, codes=stored.codes.clone(), scale_inv=scale_inv)
            offset = self._codes.storage_offset() - stored.codes.storage_offset()
            codes = fresh.codes.as_strided(self._codes.shape, self._codes.stride(), offset)
            copied: torch.Tensor = PublishedWeight(codes, fresh)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise; use a state dict or `save_published` instead.

        Raises:
            Fp8UnsupportedError: Always.
        """
        raise Fp8UnsupportedError(
            "A published FP8 weight cannot be pickled. Save model.state_dict(), which holds codes and scales, or use "
            "save_published."
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Expose the codes to compilers; published layers run outside of compiled code."""
        return ["_codes"], self._stored

    @staticmethod
    def __tensor_unflatten__(inner: dict, stored: Any, size: Any, stride: Any) -> "PublishedWeight":
        """Rebuild the weight from `__tensor_flatten__`."""
        return PublishedWeight(inner["_codes"], stored)

    # `__torch_dispatch__` selects the result types; the default would wrap the result of every operator in this class.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Keep codes in views and copies, reject writes, decode for other operators."""
        kwargs, first = kwargs or {}, args[0] if args else None
        if func is aten.copy_.default and isinstance(first, cls):
            return _copy_codes(first, args[1])
        if any(isinstance(written, cls) for written in written_tensors(func, args, kwargs)):
            raise Fp8Error(
                f"{func} would write to a published FP8 weight, whose codes belong to its file. Keep adapters "
                "separate, or replace the parameter (layer.weight = nn.Parameter(values))."
            )
        if isinstance(first, cls):
            if is_view(func) and func is not aten.view.dtype:
                # the wrapper and its codes have equal shapes and strides, so every view is the same view of the codes
                views = func(first._codes, *args[1:], **kwargs)
                return pytree.tree_map_only(torch.Tensor, lambda codes: cls(codes, first._stored), views)
            result = _published_result(first, func, args[1:], kwargs)
            if result is not None:
                return result
        args, kwargs = pytree.tree_map_only(cls, lambda weight: weight.dequantize(), (args, kwargs))
        return func(*args, **kwargs)

    # ------------------------------------------------------------ FSDP2

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Stored]:
        """Return this rank's uint8 codes, padded to equal rows, and `stored`."""
        stored = self._stored
        # A weight that FSDP2 only replicates is whole on each rank.
        rows = stored.length if stored.length == stored.shape[0] else -(-stored.shape[0] // mesh.size())
        padded = torch.Size((rows, *stored.shape[1:]))
        codes = stored.codes if stored.codes.shape == padded else stored.codes[: stored.length]
        return (pad_rows(codes, padded),), stored

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], stored: Stored, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the whole weight on the gathered codes, with dtype `param_dtype`."""
        if out is not None:
            return None  # the codes of `out` are the buffer that FSDP2 has filled again
        codes = unpad(outputs[0], stored.shape, torch.uint8)
        whole = dataclasses.replace(stored, codes=codes, first=0, dtype=param_dtype)
        return PublishedWeight(codes, whole), ()


def published_of(tensor: object) -> PublishedWeight | None:
    """Return the local published weight of a parameter or DTensor, else None."""
    local = local_of(tensor)
    return local if isinstance(local, PublishedWeight) else None


def reshard(model: nn.Module) -> None:
    """Make FSDP2 drop gathered parameters, so that modules hold their shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def operand_of(weight: PublishedWeight) -> Quantized:
    """Return a whole weight or expert as operand with the file's scales."""
    codes, scale_inv, stored = weight.codes, weight.scale_inv, weight.stored
    if stored.codes.ndim > codes.ndim:
        offset = codes.storage_offset() - stored.codes.storage_offset()
        scale_inv = scale_inv[stored.first + offset // codes.numel()]
    block = None if stored.block == (1, 0) else stored.block
    return Quantized(codes, scales_in_float32(scale_inv), E4M3, block)


def scales_in_float32(scale_inv: torch.Tensor) -> torch.Tensor:
    """Return scales of any dtype in the file as float32, exactly."""
    return scale_inv_of_e8m0(scale_inv) if scale_inv.dtype == torch.uint8 else scale_inv.float()


def _decode(codes: torch.Tensor, scale_inv: torch.Tensor, block: Block, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Return decoded values [n, columns] in `dtype`.

    Args:
        codes: uint8 [n, columns].
        scale_inv: Scales of the whole matrix; see `Stored`.
        block: Elements that share a scale.
        first: Row of the matrix at which the codes begin.
        dtype: dtype of the result.
    """
    scale, last = scales_in_float32(scale_inv), first + len(codes)
    if block == (1, 0):
        scale, block = scale[first:last], None
    elif block is not None and first % block[0] == 0:
        scale = scale[first // block[0] : -(-last // block[0])]
    elif block is not None:  # the codes begin inside of a block
        rows = torch.arange(first, last, device=scale.device) // block[0]
        scale, block = scale[rows].repeat_interleave(block[1], 1)[:, : codes.shape[1]], None
    return decoding.dequantize(codes, scale, E4M3, dtype, block)


def _copy_codes(target: PublishedWeight, source: torch.Tensor) -> PublishedWeight:
    """Copy codes to a weight, with scales of a source weight.

    Raises:
        Fp8Error: If `source` has other values, or belongs to another weight.
    """
    stored = target._stored
    if not isinstance(source, PublishedWeight):
        if source.dtype not in (CODES, torch.uint8):
            if _are_same(source, target):
                return target  # DistributedDataParallel sends the values of the first rank, from the same file
            raise Fp8Error(
                f"Values of {source.dtype} from another tensor would be copied to a published FP8 weight, whose codes "
                "belong to its file. Load codes (float8_e4m3fn) with their scales, or assign another parameter to "
                "the layer."
            )
        target._codes.copy_(source.view(torch.uint8))
        return target
    other = source._stored
    unit = max(1, math.prod(other.shape[1:]))
    # FSDP2 shards a weight by copying a view of its rows into a padded tensor of `new_zeros`: the offset of the view in
    # its storage gives the row indices.
    row, inside = divmod(int(source._codes.storage_offset() - other.codes.storage_offset()), unit)
    alike = (stored.shape, stored.block, stored.dtype) == (other.shape, other.block, other.dtype)
    moved = target._codes.storage_offset() != stored.codes.storage_offset()
    if inside or moved or not alike or source.shape != target.shape or source._codes.shape[1:] != other.codes.shape[1:]:
        raise Fp8Error(f"{source!r} cannot be copied to {target!r}: they are parts of different weights.")
    stored.first = other.first + row
    target._codes.copy_(source._codes)
    if stored.scale_inv is not other.scale_inv:
        stored.scale_inv.copy_(other.scale_inv)
    return target


def _are_same(values: torch.Tensor, weight: PublishedWeight) -> bool:
    """Return whether values equal the decoded weight in every bit."""
    if (values.dtype, values.shape) != (weight.dtype, weight.shape):
        return False
    decoded = weight.dequantize().to(values.device)
    return torch.equal(values.contiguous().view(torch.uint8), decoded.contiguous().view(torch.uint8))


def _published_result(weight: PublishedWeight, func: Any, rest: tuple, kwargs: dict) -> PublishedWeight | None:
    """Return the result of an operator that keeps codes, None for others."""
    stored, options = weight._stored, {name: value for name, value in kwargs.items() if name != "dtype"}
    if kwargs.get("dtype") not in (None, weight.dtype):
        return None
    if func is aten.new_zeros.default and torch.Size(rest[0])[1:] == stored.shape[1:]:
        # FSDP2 creates the padded tensor of its shard in this way, and copies rows to it later, if there are any.
        codes = func(weight._codes, rest[0], *rest[1:], **options)
        return PublishedWeight(codes, stored.with_codes(codes, first=stored.shape[0]))
    local_codes = stored.codes[: len(weight)] if weight.ndim == stored.codes.ndim else None
    if (
        func not in _COPIES
        or local_codes is None
        or (local_codes.shape, local_codes.stride()) != (weight.shape, weight._codes.stride())
    ):
        return None
    if weight._codes.storage_offset() != local_codes.storage_offset():
        return None
    codes = func(stored.codes, *rest, **options)
    return PublishedWeight(codes[: len(weight)], stored.with_codes(codes))


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device, uninitialized if it is on meta."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
