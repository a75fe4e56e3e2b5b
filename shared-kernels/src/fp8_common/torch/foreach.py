"""Amax and casts of many tensors, one launch per dtype.

FSDP shards are many, small and of odd sizes; some are empty. A table on the device lists them by address. It is sent
once and cached for later steps with the same tensors; it does not contain the addresses of results. So a CUDA graph can
capture the launches after a step with the same tensors. Tables that a graph uses are never removed. For compilers,
`foreach_amax` and `foreach_quantize` are operators. On other devices than GPUs, tensors are processed one by one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from fp8_common.formats import Format
from fp8_common.torch import _triton as triton
from fp8_common.torch import rounding
from fp8_common.torch._operators import operator
from fp8_common.torch.numerics import amax_bits as bits_of
from fp8_common.torch.numerics import amax_each, torch_dtype

T = TypeVar("T")

TABLES_KEPT = 64
"""Maximum number of cached tables, without those that CUDA graphs use."""


class TableRows(NamedTuple):
    """Contents of a table for tensors of one dtype.

    They are the key of the cache of tables.

    Attributes:
        addresses: Address of each tensor.
        sizes: Number of elements of each tensor.
        offsets: Offset of each result in the common buffer; empty for an amax.
        places: Position of each tensor in the whole list; empty if the whole list has one dtype.
    """

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    places: tuple[int, ...]


class Table(NamedTuple):
    """A table on the device.

    Attributes:
        tensors: Inputs of the kernels, by argument name.
        places: Position of each tensor in the whole list, int64; None if the whole list has one dtype.
        programs: Number of programs of a launch.
        aligned: Whether the addresses of all non-empty tensors are multiples of 16.
    """

    tensors: dict[str, torch.Tensor]
    places: torch.Tensor | None
    programs: int
    aligned: bool


def alike(items: Iterable[T], rule: Callable[[T], object]) -> list[list[T]]:
    """Group items with equal values of `rule`, in order of first occurrence."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(rule(item), []).append(item)
    return list(groups.values())


def amax_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the float32 bits of max |x| of each tensor.

    Args:
        tensors: At least one tensor, float16, bfloat16 or float32, any shapes, all on one device.

    Returns:
        int32 [len(tensors)]; 0 for an empty tensor.
    """
    return foreach_amax(list(tensors))


def quantize(tensors: Sequence[torch.Tensor], scales: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    """Quantize each tensor with its scale.

    Args:
        tensors: At least one tensor, float16, bfloat16 or float32, any shapes, all on one device.
        scales: Scales into FP8, float32 [len(tensors)].
        fmt: FP8 format.

    Returns:
        Contiguous tensors of the shapes of `tensors`; they may share one buffer.
    """
    if torch.compiler.is_compiling() or triton.takes(tensors[0], fmt):
        return _parts(foreach_quantize(list(tensors), scales, fmt), tensors)
    return [rounding.quantize(x, scale, fmt).contiguous() for x, scale in zip(tensors, scales.unbind(), strict=True)]


@operator(lambda tensors: tensors[0].new_empty(len(tensors), dtype=torch.int32))
def foreach_amax(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return `amax_bits`."""
    if not triton.takes(tensors[0]):
        return bits_of(amax_each(tensors))
    # An empty tensor, for which no program runs, keeps the bits 0.
    bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for dtype, places in _by_dtype(tensors).items():
        # The list keeps the tensors alive until after the launch: the table has only their addresses.
        dense = [tensors[i].contiguous() for i in places]
        table = _table(_rows(dense, (), places, len(tensors)), bits.device)
        # Usually the list has one dtype. The kernel then writes to the result directly.
        maxima = bits if table.places is None else bits.new_zeros(len(places))
        name = triton.name_of(dtype)
        plan = triton.plans().foreach_amax(table.programs, len(maxima), name, aligned=table.aligned)
        triton.run(plan, bits.device, amax_ptr=maxima, **table.tensors)
        if table.places is not None:
            bits.index_copy_(0, table.places, maxima)
    return bits


@operator(lambda tensors, scales, fmt: tensors[0].new_empty(sum(_padded_sizes(tensors)), dtype=torch_dtype(fmt)))
def foreach_quantize(tensors: list[torch.Tensor], scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of all tensors in one buffer.

    The codes of each tensor begin at a multiple of 16 elements.
    """
    # The result is one buffer, because the outputs of an operator must not share memory.
    first = tensors[0]
    *offsets, total = accumulate(_padded_sizes(tensors), initial=0)
    if not triton.takes(first, fmt):
        # The padding is zero here; kernels do not write it. Allocated as uint8, because few operations support float8.
        buffer = first.new_zeros(total, dtype=torch.uint8).view(torch_dtype(fmt))
        for part, x, scale in zip(_parts(buffer, tensors), tensors, scales.unbind(), strict=True):
            part.copy_(rounding.quantize(x, scale, fmt))
        return buffer
    buffer = first.new_empty(total, dtype=torch_dtype(fmt))
    for dtype, places in _by_dtype(tensors).items():
        dense = [tensors[i].contiguous() for i in places]
        table = _table(_rows(dense, [offsets[i] for i in places], places, len(tensors)), buffer.device)
        name = triton.name_of(dtype)
        plan = triton.plans().foreach_cast(table.programs, total, name, fmt, aligned=table.aligned)
        scales_of = scales if table.places is None else scales.index_select(0, table.places)
        triton.run(plan, buffer.device, scale_ptr=scales_of.contiguous(), y_ptr=buffer, **table.tensors)
    return buffer


def _padded_sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sizes of tensors, rounded up to multiples of 16.

    Each part of the buffer is then aligned for stores of 16 bytes.
    """
    return [-(-x.numel() // 16) * 16 for x in tensors]


def _parts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor's part of the buffer, in its shape."""
    parts = buffer.split(_padded_sizes(tensors))
    return [part[: x.numel()].view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    # A kernel is compiled for one dtype, so there is one launch per dtype.
    places: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault(x.dtype, []).append(i)
    return places


def _rows(dense: Sequence[torch.Tensor], offsets: Sequence[int], places: Sequence[int], whole: int) -> TableRows:
    addresses, sizes = tuple(x.data_ptr() for x in dense), tuple(x.numel() for x in dense)
    return TableRows(addresses, sizes, tuple(offsets), () if len(places) == whole else tuple(places))


def _table(rows: TableRows, device: torch.device) -> Table:
    # A graph refers to its tables as long as it exists, which is unknown here.
    return _kept_for_graphs(rows, device) if triton.is_capturing(device) else _cached(rows, device)


@cache
def _kept_for_graphs(rows: TableRows, device: torch.device) -> Table:
    return _cached(rows, device)


@lru_cache(maxsize=TABLES_KEPT)
def _cached(rows: TableRows, device: torch.device) -> Table:
    """Create a table on the device, with two transfers."""
    # Cached by its contents, addresses and sizes: a new tensor at an old address needs the same table.
    triton.refuse_in_capture(device, "a table of tensors that no earlier step had, or not at these addresses,")
    tensor, chunk = triton.plans().foreach_chunks(list(rows.sizes))
    columns = {"ptrs_ptr": rows.addresses, "numel_ptr": rows.sizes, "places": rows.places}
    if rows.offsets:  # empty for an amax
        columns["offset_ptr"] = rows.offsets
    # All columns of the same dtype are sent as one tensor: the cost of a copy to the device is its latency.
    values64 = torch.tensor([v for column in columns.values() for v in column], dtype=torch.int64, device=device)
    values32 = torch.tensor([*tensor, *chunk], dtype=torch.int32, device=device)
    tensors = dict(zip(columns, values64.split([len(c) for c in columns.values()]), strict=True))
    tensors["tensor_ptr"], tensors["chunk_ptr"] = values32.split([len(tensor), len(chunk)])
    places = tensors.pop("places")
    # The address of an empty tensor may be 0; nothing is read there.
    used = [address for address, size in zip(rows.addresses, rows.sizes, strict=True) if size]
    return Table(
        tensors=tensors,
        places=places if rows.places else None,
        programs=len(tensor),
        aligned=all(address % 16 == 0 for address in used),
    )
