"""The amax and the cast of a list of tensors: one kernel launch for each dtype on a GPU.

FSDP shards are many, small and odd-sized; some are empty. A table on the device lists them. It is sent once and cached
while the same tensors come again, which is every step of training, so that CUDA graphs can capture the launches. Both
are operators. Elsewhere than on a GPU they call the references for one tensor after the other.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from fp8_common import _launch as launch
from fp8_common._formats import Format, get_data_format
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._amax import amax_each, float_key
from fp8_common.torch._ops import NAMESPACE
from fp8_common.torch._quantize import quantize
from fp8_common.torch._rounding import torch_dtype

Row = tuple[int, int]
"""(address, elements) of a tensor."""
TABLES_KEPT = 64
"""Size of the cache of tables."""


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
        table = _table(tuple((x.data_ptr(), x.numel()) for x in dense), (), tensors[0].device)
        plan = launch.foreach_amax_plan(table["programs"], _name(dtype), aligned=table["aligned"])
        # The usual list has one dtype; then the kernel writes the result itself.
        whole = len(places) == len(tensors)
        found = keys if whole else keys.new_zeros(len(places))
        triton_backend.run(plan, keys.device, amax_ptr=found, **table["tensors"])
        if not whole:
            keys[places] = found
    return keys


def _launched(tensors: Sequence[torch.Tensor], scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Return FP8 data of all tensors one after the other, made by the kernels."""
    buffer = tensors[0].new_empty(sum(_padded_sizes(tensors)), dtype=torch_dtype(form))
    outputs = _parts(buffer, tensors)
    for dtype, places in _by_dtype(tensors).items():
        dense = [tensors[i].contiguous() for i in places]
        rows = tuple((x.data_ptr(), x.numel()) for x in dense)
        table = _table(rows, tuple(outputs[i].data_ptr() for i in places), scales.device)
        plan = launch.foreach_cast_plan(table["programs"], _name(dtype), form, aligned=table["aligned"])
        chosen = scales if len(places) == len(tensors) else scales[places]
        triton_backend.run(plan, scales.device, scale_ptr=chosen.contiguous(), **table["tensors"])
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


@lru_cache(maxsize=TABLES_KEPT)
def _table(rows: tuple[Row, ...], outputs: tuple[int, ...], device: torch.device) -> dict:
    """Put addresses, lengths and the chunks of all programs on the device, in two transfers."""
    # Cached by addresses and sizes, which is all that it holds: a new tensor at an old address needs the same table.
    tensor, chunk = launch.foreach_chunks([size for _, size in rows])
    columns = {
        "ptrs_ptr": [address for address, _ in rows],
        "numel_ptr": [size for _, size in rows],
        "out_ptrs_ptr": list(outputs),
    }
    # All columns of a width travel as one tensor: a copy to the device costs its latency, not its bytes.
    wide = torch.tensor([v for column in columns.values() for v in column], dtype=torch.int64, device=device)
    narrow = torch.tensor([*tensor, *chunk], dtype=torch.int32, device=device)
    tensors = dict(zip(columns, wide.split([len(c) for c in columns.values()]), strict=True))
    tensors["tensor_ptr"], tensors["chunk_ptr"] = narrow.split([len(tensor), len(chunk)])
    # An empty tensor may have the address 0; nothing is read there.
    addresses = [address for (address, size) in rows if size] + list(outputs)
    return {
        "tensors": tensors,
        "programs": len(tensor),
        "aligned": all(address % 16 == 0 for address in addresses),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
