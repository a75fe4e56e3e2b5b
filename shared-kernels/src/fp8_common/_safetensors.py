"""Files in the safetensors format: where tensors go in new ones, and the tensors of existing ones, in plain NumPy.

Format: https://github.com/huggingface/safetensors#format. The length of a JSON header in eight bytes, the header, data.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp8_common._errors import Fp8Error

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: Name of the file in the folder.
        offset: Of its first byte in the file.
        dtype: As safetensors name it.
        shape: Its shape.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file to be written: name, header and whole length."""

    name: str
    header: bytes
    size: int


def plan_files(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], most: int
) -> tuple[list[File], dict[str, Place]]:
    """Return the files for tensors, and where each goes.

    Args:
        tensors: dtype and shape of each, in order.
        metadata: Goes into every header.
        most: Bytes of a file at most, unless one tensor is larger.
    """
    bins: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if filled and filled + size > most:
            bins.append({})
            filled = 0
        bins[-1][name] = (dtype, shape)
        filled += size
    files, places = [], {}
    for number, content in enumerate(bins, 1):
        name = "model.safetensors" if len(bins) == 1 else f"model-{number:05}-of-{len(bins):05}.safetensors"
        # Tensors of the largest elements first, so that each is aligned, as the safetensors library wants them.
        ordered = sorted(content.items(), key=lambda item: -DTYPES[item[1][0]].itemsize)
        fields: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for key, (dtype, shape) in ordered:
            start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            fields[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        for key, (dtype, shape) in ordered:
            offset = len(header) + fields[key]["data_offsets"][0]
            places[key] = Place(file=name, offset=offset, dtype=dtype, shape=shape)
        files.append(File(name=name, header=header, size=len(header) + end))
    return files, places


def read_header(path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """Return where the tensors of a file lie, and its metadata.

    Raises:
        Fp8Error: It is no safetensors file, or is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(size, _LARGEST_HEADER) else b""
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__", {})
        places = {
            name: Place(
                file=path.name,
                offset=8 + length + entry["data_offsets"][0],
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
            )
            for name, entry in fields.items()
        }
        ends = [place.offset + place.nbytes for place in places.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Fp8Error(f"{path} is no safetensors file, or is cut off or damaged in its header.") from error
    if size < max(ends, default=0):
        raise Fp8Error(f"{path} is cut off: {size} of {max(ends)} bytes are there. Use another copy.")
    return places, metadata


def read_tensor(folder: Path, place: Place) -> NDArray[Any]:
    """Return a tensor, mapped from its file and not read before it is used."""
    dtype = DTYPES[place.dtype]
    if not place.nbytes:
        return np.zeros(place.shape, dtype)
    return np.memmap(folder / place.file, mode="r", dtype=dtype, offset=place.offset, shape=place.shape)


def index_of(places: Iterable[tuple[str, Place]]) -> dict[str, Any]:
    """Return `model.safetensors.index.json`."""
    listed = list(places)
    total = sum(place.nbytes for _, place in listed)
    return {"metadata": {"total_size": total}, "weight_map": {name: place.file for name, place in listed}}
