"""Amax and casts of many tensors, one launch per dtype.

FSDP shards are many, small and odd-sized; some are empty. A table on the device lists them by address. It is sent once
and cached while the same tensors come again, which is every step of training; where results go is no part of it. A
CUDA graph can therefore capture the launches after a step with the same tensors, and its tables are kept for good. Both
are operators to compilers. Elsewhere than on a GPU they cast one tensor after the other.
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
"""Size of the cache of tables that no CUDA graph uses."""


class TableRows(NamedTuple):
    """Key of a table, for tensors of one dtype.

    Attributes:
        addresses: Of the tensors.
        sizes: Their elements.
        offsets: Where their results begin in the buffer of all; none for an amax.
        places: Their positions in the whole list; none if they are the whole list.
    """

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    places: tuple[int, ...]


class Table(NamedTuple):
    """A table on the device.

    Attributes:
        tensors: Inputs of the kernels, by argument name.
        places: int64, the positions in the whole list; None if it holds all.
        programs: How many programs the list takes.
        aligned: Whether all addresses are multiples of 16.
    """

    tensors: dict[str, torch.Tensor]
    places: torch.Tensor | None
    programs: int
    aligned: bool


def alike(items: Iterable[T], rule: Callable[[T], object]) -> list[list[T]]:
    """Return lists of items with equal rules, for batched operations."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(rule(item), []).append(item)
    return list(groups.values())


def amax_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int32 bits of max |x| of each tensor.

    [len(tensors)]; 0 for an empty one.

    Args:
        tensors: float16, bfloat16 or float32, any shapes, all on one device; at least one.
    """
    return foreach_amax(list(tensors))


def quantize(tensors: Sequence[torch.Tensor], scales: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    """Return fp8(x * scale) for each tensor and its scale.

    Args:
        tensors: float16, bfloat16 or float32, any shapes, all on one device; at least one.
        scales: float32 [len(tensors)].
        fmt: The format of the results.

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
    # 0 stands for an empty tensor, for which no program runs.
    bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for dtype, places in _by_dtype(tensors).items():
        # Kept in a list until after the launch: the table holds addresses, which keep no tensor alive.
        dense = [tensors[i].contiguous() for i in places]
        table = _table(_rows(dense, (), places, len(tensors)), bits.device)
        # The usual list has one dtype; then the kernel writes the result itself.
        maxima = bits if table.places is None else bits.new_zeros(len(places))
        name = triton.name_of(dtype)
        plan = triton.plans().foreach_amax(table.programs, len(maxima), name, aligned=table.aligned)
        triton.run(plan, bits.device, amax_ptr=maxima, **table.tensors)
        if table.places is not None:
            bits.index_copy_(0, table.places, maxima)
    return bits


@operator(lambda tensors, scales, fmt: tensors[0].new_empty(sum(_padded_sizes(tensors)), dtype=torch_dtype(fmt)))
def foreach_quantize(tensors: list[torch.Tensor], scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of all tensors, concatenated.

    Each starts at a multiple of 16.
    """
    # One buffer and not a list of parts: the outputs of an operator must not share memory.
    first = tensors[0]
    *offsets, total = accumulate(_padded_sizes(tensors), initial=0)
    if not triton.takes(first, fmt):
        # Zeros where the kernels leave padding unwritten; made as uint8, because few operations know float8.
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
    """Return padded sizes of tensors, multiples of 16.

    Every part then starts aligned for 16-byte stores.
    """
    return [-(-x.numel() // 16) * 16 for x in tensors]


def _parts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor's part of the buffer, in its shape."""
    parts = buffer.split(_padded_sizes(tensors))
    return [part[: x.numel()].view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    # A kernel is compiled for one dtype, so each gets a launch.
    places: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault(x.dtype, []).append(i)
    return places


def _rows(dense: Sequence[torch.Tensor], offsets: Sequence[int], places: Sequence[int], whole: int) -> TableRows:
    addresses, sizes = tuple(x.data_ptr() for x in dense), tuple(x.numel() for x in dense)
    return TableRows(addresses, sizes, tuple(offsets), () if len(places) == whole else tuple(places))


def _table(rows: TableRows, device: torch.device) -> Table:
    # A graph points to its tables while it lives, which is unknown here.
    return _kept_for_graphs(rows, device) if triton.is_capturing(device) else _cached(rows, device)


@cache
def _kept_for_graphs(rows: TableRows, device: torch.device) -> Table:
    return _cached(rows, device)


@lru_cache(maxsize=TABLES_KEPT)
def _cached(rows: TableRows, device: torch.device) -> Table:
    """Copy addresses, lengths and chunks to the device.

    In two transfers.
    """
    # Cached by addresses and sizes, which is all that it holds: a new tensor at an old address needs the same table.
    triton.refuse_in_capture(device, "a table of tensors that no earlier step had, or not at these addresses,")
    tensor, chunk = triton.plans().foreach_chunks(list(rows.sizes))
    columns = {"ptrs_ptr": rows.addresses, "numel_ptr": rows.sizes, "places": rows.places}
    if rows.offsets:  # an amax has none
        columns["offset_ptr"] = rows.offsets
    # All columns of one width are sent as one tensor: a copy to the device costs its latency, not its bytes.
    wide = torch.tensor([v for column in columns.values() for v in column], dtype=torch.int64, device=device)
    narrow = torch.tensor([*tensor, *chunk], dtype=torch.int32, device=device)
    tensors = dict(zip(columns, wide.split([len(c) for c in columns.values()]), strict=True))
    tensors["tensor_ptr"], tensors["chunk_ptr"] = narrow.split([len(tensor), len(chunk)])
    places = tensors.pop("places")
    # An empty tensor may have the address 0; nothing is read there.
    used = [address for address, size in zip(rows.addresses, rows.sizes, strict=True) if size]
    return Table(
        tensors=tensors,
        places=places if rows.places else None,
        programs=len(tensor),
        aligned=all(address % 16 == 0 for address in used),
    )
