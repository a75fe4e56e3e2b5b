"""`CheckpointSource`: values read from a checkpoint, high-precision ones or this package's FP8 codes and scales."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch import FLOAT8_DTYPES, dequantize, read_metadata
from fp8_common.torch.plugin import ShardGeometry
from fp8_te_init._checkpoint_names import SCALE
from fp8_te_init._compat import local_of
from fp8_te_init._rows import Rows
from fp8_te_init._shards import place_of
from fp8_te_init._sources.base import QuantizedRows, Source
from fp8_te_init._stacked_layout import layout_of

Checkpoint = Mapping[str, torch.Tensor] | str | Path
"""Tensors by name, a file of torch.save, or a folder of torch.distributed.checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReader:
    """Finds tensors by the names of a model's parameters.

    Attributes:
        holds: Whether there is a tensor of a name.
        read: Returns it, plain, distributed or FP8; a file is read then, and not before.
    """

    holds: Callable[[str], bool]
    read: Callable[[str], torch.Tensor]


_CASTS = [CastRecipe(granularity=name) for name in ("tensorwise", "rowwise", "blockwise_128x128")]


class CheckpointSource(Source):
    """Reads rows when they are asked for.

    Args:
        reader: Where it reads.
        name: The parameter's name in the checkpoint.
        rows: The rows that this source gives.
        parameter: The parameter, plain or distributed.
    """

    name: ClassVar[str] = "checkpoint"

    def __init__(self, reader: CheckpointReader, name: str, rows: Rows, parameter: torch.Tensor) -> None:
        self._reader, self._name, self.rows, self._shape = reader, name, rows, parameter.shape
        self._parameter = parameter

    @property
    def nbytes(self) -> int:
        """Nothing."""
        return 0

    def values(self, quantized: QuantizedRows | None = None) -> torch.Tensor:
        """Read the rows [n, ...]; codes are dequantized with the scales beside them.

        Raises:
            Fp8Error: The tensor has another shape, holds no values, or cannot be read.
        """
        tensor = self._reader.read(self._name)
        if tensor.shape != self._shape:
            raise Fp8Error(
                f"{self._name} has shape {tuple(tensor.shape)} in the checkpoint, and the model's parameter has "
                f"{tuple(self._shape)}. Use the checkpoint of this model."
            )
        # float8 is a floating-point dtype for torch, so it has to be asked for first
        if tensor.dtype in FLOAT8_DTYPES:
            return self._dequantized(tensor)
        if not tensor.is_floating_point():
            raise Fp8Error(
                f"{self._name} holds {tensor.dtype} in the checkpoint, which are no values. Give high-precision "
                "tensors, or the FP8 state dict of a model of this package."
            )
        return self._own_rows(tensor)

    def narrowed(self, rows: Rows) -> "CheckpointSource":
        """Return the source of some rows."""
        return CheckpointSource(self._reader, self._name, rows, self._parameter)

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # By what all ranks know, never by the rows that this one needs: the other way is a collective.
            if self._is_distributed_like(tensor):
                return _values(local_of(tensor))[self.rows.inside(place_of(tensor))]
            tensor = tensor.full_tensor()
        return _values(tensor)[self.rows.inside()]

    def _is_distributed_like(self, tensor: DTensor) -> bool:
        own = self._parameter
        return isinstance(own, DTensor) and (own.device_mesh, own.placements) == (tensor.device_mesh, tensor.placements)

    def _dequantized(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._reader.holds(f"{self._name}{SCALE}"):
            raise Fp8Error(
                f"{self._name} holds FP8 codes in the checkpoint, but {self._name}{SCALE} is missing: codes mean "
                "nothing without their scales. Give both, or high-precision values."
            )
        scale = self._reader.read(f"{self._name}{SCALE}")
        layouts = [layout_of(cast, self._shape) for cast in _CASTS]
        # which granularity it is shows in the shape of the scales
        layout = next((one for one in layouts if one.shape(self._shape) == tuple(scale.shape)), None)
        if layout is None:
            raise Fp8Error(
                f"{self._name}{SCALE} has shape {tuple(scale.shape)} in the checkpoint, which are no scales of a "
                f"weight {tuple(self._shape)}. Use the checkpoint of this model."
            )
        own = self._own_rows(tensor)
        geometry = ShardGeometry(full_shape=self._shape, first_index=self.rows.start)
        # the scales of the rows that are held here, in a shape that broadcasts to them
        scale = layout.of_part(scale, torch.Size((len(own), *self._shape[1:])), geometry)
        if scale.ndim and scale.shape[-1] > 1:
            scale = scale[Rows(0, len(own), self.rows.columns).inside()]
        return dequantize(own, scale, FLOAT8_DTYPES[tensor.dtype], torch.float32)


def reader_of(checkpoint: Checkpoint, prefix: str = "") -> CheckpointReader:
    """Return what finds the tensors of a checkpoint.

    Args:
        checkpoint: See `Checkpoint`.
        prefix: What stands before the names of the model's parameters in the checkpoint.

    Raises:
        Fp8Error: There is no such file or folder, or it is damaged.
    """
    if isinstance(checkpoint, Mapping):
        return _reader_of_mapping(checkpoint, prefix)
    path = Path(checkpoint)
    if path.is_dir():
        known = read_metadata(path).state_dict_metadata
        return CheckpointReader(
            holds=lambda name: prefix + name in known, read=lambda name: _from_folder(path, known, prefix + name)
        )
    if not path.is_file():
        raise Fp8Error(f"There is no checkpoint {str(path)!r}: give a file of torch.save or a folder of DCP.")
    # mmap: the file may be larger than the memory; a tensor is read when it is asked for
    mapped = _told(path, partial(torch.load, path, map_location="cpu", mmap=True, weights_only=True))
    return _reader_of_mapping(mapped, prefix)


def _reader_of_mapping(tensors: Mapping[str, torch.Tensor], prefix: str) -> CheckpointReader:
    return CheckpointReader(holds=lambda name: prefix + name in tensors, read=lambda name: tensors[prefix + name])


def _from_folder(path: Path, known: Mapping[str, Any], name: str) -> torch.Tensor:
    target = torch.empty(known[name].size, dtype=known[name].properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        # no_dist: each rank reads what it needs when it needs it. A collective load would need all ranks to ask for the
        # same names in the same order, and one that fails would leave the others waiting.
        _told(path, partial(dcp.load, {name: target}, checkpoint_id=path, no_dist=True))
    return target


def _told(path: Path, read: Callable[[], Any]) -> Any:
    """Read, and say which checkpoint it was if that fails: every kind of damage raises something else."""
    try:
        return read()
    # DCP's own exception is no Exception
    except (Exception, CheckpointException) as error:
        raise Fp8Error(
            f"The checkpoint {str(path)!r} cannot be read ({type(error).__name__}: {error}). Is it whole?"
        ) from error


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return plain values of a tensor that may be an FP8 weight."""
    # Exactly these: torch.Tensor has a `dequantize` too, for its own quantized dtypes, which raises for others. Codes
    # need their scales.
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.dtype in FLOAT8_DTYPES:
        return tensor
    read: Any = getattr(tensor, "dequantize", None)
    return tensor if read is None else read()
