"""The amax and the cast of a list of tensors: one kernel launch for each dtype on a GPU.

FSDP shards are many, small and odd-sized; some are empty. A table on the device lists them by address. It is sent once
and cached while the same tensors come again, which is every step of training; where results go is no part of it. A
CUDA graph can therefore capture the launches after a step with the same tensors, and its tables are kept for good. Both
are operators. Elsewhere than on a GPU they call the references for one tensor after the other.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from fp8_common._formats import Format, get_data_format
from fp8_common.torch import _capture as capture
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._amax import amax_each, float_key
from fp8_common.torch._ops import NAMESPACE
from fp8_common.torch._quantize import quantize
from fp8_common.torch._rounding import torch_dtype

TABLES_KEPT = 64
"""Size of the cache of tables that no CUDA graph uses."""


class Rows(NamedTuple):
    """What a table is made from, for tensors of one dtype.

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
        tensors: What the kernels read, by the names of their arguments.
        places: int64, the positions in the whole list; None if it holds all.
        programs: How many programs the list takes.
        aligned: Whether all addresses are multiples of 16.
    """

    tensors: dict[str, torch.Tensor]
    places: torch.Tensor | None
    programs: int
    aligned: bool


def amax_keys(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the int32 key of max |x| of each of `tensors`, [len(tensors)]; 0 for an empty one.

    Args:
        tensors: float16, bfloat16 or float32, any shapes, all on one device; at least one.
    """
    # Compilers see one operator; eager code saves its overhead, as in `_dispatch`.
    return foreach_amax(list(tensors)) if torch.compiler.is_compiling() else _amax_keys(tensors)


def cast(tensors: Sequence[torch.Tensor], scales: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    """Return fp8(x * scale) for each tensor and its scale.

    Args:
        tensors: float16, bfloat16 or float32, any shapes, all on one device; at least one.
        scales: float32 [len(tensors)].
        fmt: The format of the results.

    Returns:
        Contiguous tensors of the shapes of `tensors`; they may share one buffer.
    """
    if torch.compiler.is_compiling():
        return _parts(foreach_cast(list(tensors), scales, fmt.name), tensors)
    if not triton_backend.applies(tensors[0], fmt):
        return [quantize(x, scale, fmt).contiguous() for x, scale in zip(tensors, scales.unbind(), strict=True)]
    return _parts(_launched(tensors, scales, fmt), tensors)


def _amax_keys(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not triton_backend.applies(tensors[0]):
        return float_key(amax_each(tensors))
    # 0 is the key of an empty tensor, for which no program runs.
    keys = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for dtype, places in _by_dtype(tensors).items():
        # Kept in a list until after the launch: the table holds addresses, which keep no tensor alive.
        dense = [tensors[i].contiguous() for i in places]
        table = _table(_rows(dense, (), places, len(tensors)), keys.device)
        # The usual list has one dtype; then the kernel writes the result itself.
        found = keys if table.places is None else keys.new_zeros(len(places))
        plan = triton_backend.plans().foreach_amax(table.programs, len(found), _name(dtype), aligned=table.aligned)
        triton_backend.run(plan, keys.device, amax_ptr=found, **table.tensors)
        if table.places is not None:
            keys.index_copy_(0, table.places, found)
    return keys


def _launched(tensors: Sequence[torch.Tensor], scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Return FP8 data of all tensors one after the other, made by the kernels."""
    *offsets, total = accumulate(_padded_sizes(tensors), initial=0)
    buffer = tensors[0].new_empty(total, dtype=torch_dtype(form))
    for dtype, places in _by_dtype(tensors).items():
        dense = [tensors[i].contiguous() for i in places]
        table = _table(_rows(dense, [offsets[i] for i in places], places, len(tensors)), buffer.device)
        plan = triton_backend.plans().foreach_cast(table.programs, total, _name(dtype), form, aligned=table.aligned)
        chosen = scales if table.places is None else scales.index_select(0, table.places)
        triton_backend.run(plan, buffer.device, scale_ptr=chosen.contiguous(), y_ptr=buffer, **table.tensors)
    return buffer


@torch.library.custom_op(f"{NAMESPACE}::foreach_amax", mutates_args=())
def foreach_amax(tensors: list[torch.Tensor]) -> torch.Tensor:
    """int32 keys [len(tensors)] of max |x|."""
    return _amax_keys(tensors)


@foreach_amax.register_fake
def _(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::foreach_cast", mutates_args=())
def foreach_cast(tensors: list[torch.Tensor], scales: torch.Tensor, fmt: str) -> torch.Tensor:
    """FP8 data of all tensors one after the other, each from a multiple of 16 on."""
    # One buffer and not a list of parts: the outputs of an operator must not share memory.
    form, first = get_data_format(fmt), tensors[0]
    if not triton_backend.applies(first, form):
        # Zeros where the kernels leave padding unwritten; made as uint8, because few operations know float8.
        buffer = first.new_zeros(sum(_padded_sizes(tensors)), dtype=torch.uint8).view(torch_dtype(form))
        for part, x, scale in zip(_parts(buffer, tensors), tensors, scales.unbind(), strict=True):
            part.copy_(quantize(x, scale, form))
        return buffer
    return _launched(tensors, scales, form)


@foreach_cast.register_fake
def _(tensors: list[torch.Tensor], scales: torch.Tensor, fmt: str) -> torch.Tensor:
    return tensors[0].new_empty(sum(_padded_sizes(tensors)), dtype=torch_dtype(fmt))


def _padded_sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Elements of each tensor, rounded up to 16 so that every part starts aligned for 16-byte stores."""
    return [-(-x.numel() // 16) * 16 for x in tensors]


def _parts(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the part of the buffer that belongs to each tensor, in its shape."""
    parts = buffer.split(_padded_sizes(tensors))
    return [part[: x.numel()].view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    # A kernel is compiled for one dtype, so each gets a launch.
    places: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        places.setdefault(x.dtype, []).append(i)
    return places


def _rows(dense: Sequence[torch.Tensor], offsets: Sequence[int], places: Sequence[int], whole: int) -> Rows:
    addresses, sizes = tuple(x.data_ptr() for x in dense), tuple(x.numel() for x in dense)
    return Rows(addresses, sizes, tuple(offsets), () if len(places) == whole else tuple(places))


def _table(rows: Rows, device: torch.device) -> Table:
    # A graph points to its tables for as long as it lives, which nobody here knows.
    return _kept_for_graphs(rows, device) if capture.is_capturing(device) else _cached(rows, device)


@cache
def _kept_for_graphs(rows: Rows, device: torch.device) -> Table:
    return _cached(rows, device)


@lru_cache(maxsize=TABLES_KEPT)
def _cached(rows: Rows, device: torch.device) -> Table:
    """Put addresses, lengths and the chunks of all programs on the device, in two transfers."""
    # Cached by addresses and sizes, which is all that it holds: a new tensor at an old address needs the same table.
    capture.refuse(device, "a table of tensors that no earlier step had, or not at these addresses,")
    tensor, chunk = triton_backend.plans().foreach_chunks(list(rows.sizes))
    columns = {"ptrs_ptr": rows.addresses, "numel_ptr": rows.sizes, "offset_ptr": rows.offsets, "places": rows.places}
    # All columns of a width travel as one tensor: a copy to the device costs its latency, not its bytes.
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
