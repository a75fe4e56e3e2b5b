"""`CheckpointSource`: values read again from the checkpoint that the codes came from."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed.checkpoint as dcp

from fp8_common import Fp8Error
from fp8_common.torch.plugin import read_metadata
from fp8_te_init._compat import local_of
from fp8_te_init._sources.base import QuantizedRows, Rows, Source

Checkpoint = Mapping[str, torch.Tensor] | str | Path
"""High-precision tensors by name, a file of torch.save, or a folder of torch.distributed.checkpoint."""


class CheckpointSource(Source):
    """Reads rows when they are asked for.

    Args:
        read: Returns the whole tensor [rows, columns]; a mapped file reads only what is used of it.
        rows: The rows that this source gives.
    """

    name: ClassVar[str] = "checkpoint"

    def __init__(self, read: Callable[[], torch.Tensor], rows: Rows) -> None:
        self._read, self.rows = read, rows

    @property
    def nbytes(self) -> int:
        """Nothing."""
        return 0

    def values(self, quantized: QuantizedRows | None = None) -> torch.Tensor:
        """Read the rows [n, columns]."""
        return self._read()[self.rows.start : self.rows.stop]

    def narrowed(self, rows: Rows) -> "CheckpointSource":
        """Return the source of some rows."""
        return CheckpointSource(self._read, rows)


def reader_of(checkpoint: Checkpoint, prefix: str = "") -> Callable[[str], Callable[[], torch.Tensor] | None]:
    """Return what finds the tensor of a name: a function that reads it, or None if it is not there.

    Args:
        checkpoint: See `Checkpoint`.
        prefix: What stands before the names of the model's parameters in the checkpoint.

    Raises:
        Fp8Error: There is no such file or folder, or the folder's index is damaged.
    """
    if isinstance(checkpoint, Mapping):
        return lambda name: _from_mapping(checkpoint, prefix + name)
    path = Path(checkpoint)
    if path.is_dir():
        known = read_metadata(path).state_dict_metadata
        return lambda name: _from_folder(path, known, prefix + name)
    if not path.is_file():
        raise Fp8Error(f"There is no checkpoint {str(path)!r}: give a file of torch.save or a folder of DCP.")
    mapped = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return lambda name: _from_mapping(mapped, prefix + name)


def _from_mapping(tensors: Mapping[str, torch.Tensor], name: str) -> Callable[[], torch.Tensor] | None:
    return (lambda: local_of(tensors[name])) if name in tensors else None


def _from_folder(path: Path, known: Mapping[str, object], name: str) -> Callable[[], torch.Tensor] | None:
    if name not in known:
        return None

    def read() -> torch.Tensor:
        meta = known[name]
        target = torch.empty(meta.size, dtype=meta.properties.dtype)  # pyrefly: ignore[missing-attribute]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
            dcp.load({name: target}, checkpoint_id=path, no_dist=True)
        return target

    return read
