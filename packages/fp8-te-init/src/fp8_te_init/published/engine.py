"""`stream_weights`, `stream_tensors`: weights for an engine, from shards, in buckets, each part with its digest."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_te_init.published.digests import digest
from fp8_te_init.published.files import BLOCK, Checkpoint
from fp8_te_init.published.load import published_tensors
from fp8_te_init.published.names import Rename
from fp8_te_init.published.weight import CODES


class Sent(NamedTuple):
    """Rows of a tensor under the engine's name, the index of the first of them, and their digest."""

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
    """Yield what this rank holds of a model, as an engine loads the published files; nothing is gathered.

    Codes and scales are those that the trainer computes with: the receiver's digests (`digests.Receiver`) prove that
    it got the same bytes. Engines may change them after loading: see the guide.

    Args:
        model: As `load_published` filled it, whole or sharded. Adapters are not sent.
        like: The folder that was loaded: its names, dtypes and shapes are those that engines read.
        bucket_bytes: The largest size of a bucket; a row is never divided.
        power_of_2_scales: Send codes of blocks with the next larger power of two as their scale, rounded once. Engines
            that turn float scales into E8M0 change no value then. The trainer's values are the unrounded ones.
        rename: As of `convert_published`.

    Yields:
        Lists of rows, their names, places and digests.

    Raises:
        Fp8Error: `bucket_bytes` is not positive.
    """
    files = Checkpoint(like)
    tensors = published_tensors(model, files, rename)
    yield from _buckets(_rescaled(tensors, files) if power_of_2_scales else tensors, bucket_bytes)


@torch.no_grad()
def stream_tensors(tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = 1 << 28) -> Iterator[list[Sent]]:
    """Yield what this rank holds of a state dict under an engine's names; nothing is gathered.

    With `fp8_common.torch_layers.export.serving_state_dict` these are the codes and scales of weights that are trained
    in high precision, by the rule of compressed-tensors or of DeepSeek.

    Args:
        tensors: Whole, or DTensors that are cut along their first dimension.
        bucket_bytes: As of `stream_weights`.

    Yields:
        Lists of rows, their names, places and digests. A `Receiver` takes `{name: len(tensor)}`, 1 for scalars.

    Raises:
        Fp8Error: A tensor is cut along another dimension, or `bucket_bytes` is not positive.
    """
    yield from _buckets((_rows_here(name, tensor) for name, tensor in tensors.items()), bucket_bytes)


def _rows_here(name: str, tensor: torch.Tensor) -> tuple[str, int, torch.Tensor]:
    offset, local = region_of(tensor).offset, local_of(tensor)
    if local.shape[1:] != tensor.shape[1:]:
        raise Fp8Error(f"{name} is cut along another dimension than the first, and engines take rows.")
    return name, offset[0] if offset else 0, local


def _buckets(tensors: Iterable[tuple[str, int, torch.Tensor]], bucket_bytes: int) -> Iterator[list[Sent]]:
    """Yield (name, first row, rows) in lists of at most so many bytes, with digests."""
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
    """Return how many rows each tensor of a published model has: what `digests.Receiver` takes."""
    return {name: entry.shape[0] if entry.shape else 1 for name, entry in Checkpoint(like).entries.items()}


def _rescaled(
    tensors: Iterator[tuple[str, int, torch.Tensor]], files: Checkpoint
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Change codes of blocks, and the scales behind them, to powers of two; everything else stays."""
    for name, first, tensor in tensors:
        layout = files.layout(name) if tensor.dtype == CODES else None
        if layout is None or layout.block != (BLOCK, BLOCK) or tensor.ndim != 2:
            yield name, first, tensor
            continue
        scale, _, scales = next(tensors)  # scales come behind their codes
        old = scales.float().reshape(-(-files.entries[name].shape[0] // BLOCK), -1)
        new = torch.exp2(torch.ceil(torch.log2(old)))
        rows = torch.arange(first, first + len(tensor), device=old.device) // BLOCK
        # old / new is at most 1: no code saturates, and no rank needs the amax of another's rows
        ratio = (old / new)[rows].repeat_interleave(BLOCK, 1)[:, : tensor.shape[1]]
        yield name, first, (tensor.float() * ratio).to(CODES)
        yield scale, 0, new.to(scales.dtype).reshape(scales.shape)
