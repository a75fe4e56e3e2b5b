"""Streams of local rows of weights for inference engines, with digests."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import CastRecipe, Fp8Error, Fp8UnsupportedError
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from fp8_te_init.published.digests import digest
from fp8_te_init.published.files import BLOCK, Checkpoint
from fp8_te_init.published.load import published_tensors
from fp8_te_init.published.names import Rename
from fp8_te_init.published.weight import CODES, E4M3


class Sent(NamedTuple):
    """Rows of a tensor: name, index of the first row, rows, digest."""

    name: str
    first: int
    rows: torch.Tensor
    digest: int


@torch.no_grad()
def stream_weights(
    model: nn.Module,
    like: str | Path,
    *,
    bucket_bytes: int = 1 << 28,
    power_of_2_scales: bool = False,
    rename: Rename = None,
) -> Iterator[list[Sent]]:
    """Yield this rank's rows of a model in the published layout.

    Nothing is gathered. The codes and scales are the model's own, and a `Receiver` checks by digests that the same
    bytes were received. Engines may change them after loading; see the guide on published models.

    Args:
        model: Model that `load_published` has filled, whole or sharded. Adapters are not sent.
        like: Folder that was loaded; engines expect its names, dtypes and shapes.
        bucket_bytes: Largest size of a bucket in bytes. A row is never divided; a longer row gets a larger bucket.
        power_of_2_scales: Whether to requantize blocks with float scales to powers of two, as vLLM does for DeepGEMM
            after loading. The engine ends with these values whether it receives them or converts the
            others itself. The model is not changed. Collective: all ranks iterate.
        rename: See `convert_published`.

    Yields:
        Lists of rows with their names, positions and digests.

    Raises:
        Fp8Error: If `bucket_bytes` is not positive, or the folder does not fit the model.
    """
    rows = (_requantized if power_of_2_scales else published_tensors)(model, Checkpoint(like), rename)
    yield from _buckets(rows, bucket_bytes)


@torch.no_grad()
def stream_tensors(tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = 1 << 28) -> Iterator[list[Sent]]:
    """Yield this rank's rows of a state dict, in buckets.

    Nothing is gathered. Pass `fp8_common.torch_layers.export.serving_state_dict` to send codes and scales of weights
    that are trained in high precision, in the format of compressed-tensors or DeepSeek.

    Args:
        tensors: Tensors by the engine's names: whole, or DTensors that are sharded along their first dimension.
        bucket_bytes: See `stream_weights`.

    Yields:
        Lists of rows with their names, positions and digests. Create the `Receiver` with `{name: len(tensor)}`, and 1
        for scalars.

    Raises:
        Fp8Error: If a tensor is sharded along another dimension, or `bucket_bytes` is not positive.
    """
    yield from _buckets((_local_rows(name, tensor) for name, tensor in tensors.items()), bucket_bytes)


def _local_rows(name: str, tensor: torch.Tensor) -> tuple[str, int, torch.Tensor]:
    """Return (name, index of the first local row, local rows)."""
    offset, local = region_of(tensor).offset, local_of(tensor)
    if local.shape[1:] != tensor.shape[1:]:
        raise Fp8Error(f"{name} is cut along another dimension than the first, and engines take rows.")
    return name, offset[0] if offset else 0, local


def _buckets(tensors: Iterable[tuple[str, int, torch.Tensor]], bucket_bytes: int) -> Iterator[list[Sent]]:
    """Yield buckets of limited bytes from (name, first row, rows)."""
    if bucket_bytes <= 0:
        raise Fp8Error(f"bucket_bytes must be positive, got {bucket_bytes}.")
    bucket, size = list[Sent](), 0
    for name, first, tensor in tensors:
        whole = tensor if tensor.ndim else tensor.reshape(1)
        step = max(1, bucket_bytes // max(1, whole[:1].nbytes))
        for low in range(0, len(whole), step):
            rows = whole[low : low + step]
            if bucket and size + rows.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            data = rows.contiguous().view(torch.uint8).reshape(len(rows), -1).cpu().numpy()
            bucket.append(Sent(name, first + low, rows, digest(name, first + low, data)))
            size += rows.nbytes
    if bucket:
        yield bucket


def rows_of(like: str | Path) -> dict[str, int]:
    """Return the row counts of a folder's tensors, for a `Receiver`."""
    return {name: entry.shape[0] if entry.shape else 1 for name, entry in Checkpoint(like).entries.items()}


def _requantized(model: nn.Module, files: Checkpoint, rename: Rename) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield `published_tensors` with block scales converted like vLLM's for DeepGEMM.

    The scale of a block is the amax of its decoded values (at least 1e-4), divided by 448 and rounded up to a power of
    two. The decoded values are then rounded to E4M3 again. Source: vLLM 0.33, `requant_weight_ue8m0_inplace` and
    `per_block_cast_to_fp8`.
    """
    grids, shapes = dict[str, ScaleGrid](), dict[str, torch.Size]()
    for name, entry in files.entries.items():
        with contextlib.suppress(Fp8UnsupportedError):  # a tensor that belongs to no parameter
            layout = files.layout(name) if entry.dtype == "F8_E4M3" else None
            if layout is not None and layout.block == (BLOCK, BLOCK) and layout.dtype != torch.float8_e8m0fnu:
                grids[name] = ScaleGrid(CastRecipe(granularity="blockwise_128x128"), len(entry.shape) == 3)
                shapes[name] = torch.Size(entry.shape)

    def walk() -> Iterator[tuple[str, Region, torch.Tensor, tuple[str, int, torch.Tensor] | None]]:
        tensors = published_tensors(model, files, rename)
        for name, first, rows in tensors:  # scales follow their codes
            region = Region.along(0, first, shapes.get(name, rows.shape))
            yield name, region, rows, next(tensors) if name in grids else None

    def decoded(name: str, region: Region, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        inv = scales.float().reshape(grids[name].shape(region.full_shape))
        return codes.float() * grids[name].of_part(inv, codes.shape, region)

    device = next(model.parameters()).device
    sizes = {name: math.prod(grid.shape(shapes[name])) for name, grid in grids.items()}
    bits = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    for name, region, rows, behind in walk():
        if behind is not None:
            values = decoded(name, region, rows, behind[2])
            bits[name] = bits[name].maximum(grids[name].amax_bits(values, region))
    # several ranks may hold rows of one block
    agreed, _ = max_over_ranks(list(bits.values()), dist.group.WORLD if dist.is_initialized() else None)
    bits = dict(zip(bits, agreed, strict=True))
    for name, region, rows, behind in walk():
        if behind is None:
            yield name, region.offset[0] if region.offset else 0, rows
            continue
        grid, (scale, _, old) = grids[name], behind
        wanted = grid.amax(bits[name], region.full_shape).clamp(1e-4) / E4M3.max
        scale_inv = torch.exp2(torch.ceil(torch.log2(wanted)))
        values = decoded(name, region, rows, old)
        yield name, region.offset[0], (values / grid.of_part(scale_inv, values.shape, region)).to(CODES)
        yield scale, 0, scale_inv.to(old.dtype).reshape(old.shape)
