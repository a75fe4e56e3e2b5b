"""`read_for_serving`: a folder of FP8 weights for serving engines, read without any of them; and how two differ."""

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_common._errors import Fp8Error
from fp8_common._formats import FORMATS
from fp8_common._rounding import decode
from fp8_common._safetensors import Place, read_header, read_tensor
from fp8_common._serving_layouts import LAYOUTS, scales_of_elements

NOTES = "fp8_export.json"
"""The file in which an export says how it was made."""

_SUFFIXES = sorted({layout.suffix for layout in LAYOUTS}, key=len, reverse=True)
_CODES = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedTensor:
    """One tensor of a served checkpoint.

    Attributes:
        name: Its name.
        data: uint8 codes for FP8, else the values as stored.
        scale: Stored scales, which multiply back: float32, or uint8 E8M0 codes; None beside tensors that are not FP8.
        format: "e4m3" or "e5m2"; None for a tensor that is not FP8.
    """

    name: str
    data: NDArray[Any]
    scale: NDArray[Any] | None = None
    format: str | None = None

    def values(self) -> NDArray[Any]:
        """Return what it stands for: code * scale in float32, or the values as stored.

        Raises:
            Fp8Error: Its scales are none for a tensor of its shape.
        """
        if self.format is None:
            return np.asarray(self.data)
        values = decode(self.data, FORMATS[self.format])
        if self.scale is None:
            return values
        with np.errstate(all="ignore"):
            return values * scales_of_elements(self.scale, self.data.shape)

    def scale_rule(self) -> str:
        """Return the shape of the scales, and whether all are powers of two."""
        if self.scale is None:
            return "no scales"
        if self.scale.dtype == np.uint8:
            return f"E8M0 {list(self.scale.shape)}"
        powers = not (np.ascontiguousarray(self.scale, np.float32).view(np.uint32) & 0x7FFFFF).any()
        return f"float32 {list(self.scale.shape)}, " + ("powers of two" if powers else "not powers of two")


class ServedCheckpoint(Mapping[str, ServedTensor]):
    """Tensors by name, scales with their weights; read when they are asked for.

    Attributes:
        path: The folder or file.
        config: `quantization_config`; empty if there is none.
        notes: How `export_for_serving` made it; empty for others.
    """

    def __init__(self, path: Path, places: Mapping[str, tuple[Path, Place]], config: dict, notes: dict) -> None:
        self.path, self.config, self.notes, self._places = path, config, notes, places
        self._scales: dict[str, str] = {}
        for name in places:
            owner = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
            if owner != name and owner in places and places[owner][1].dtype in _CODES:
                self._scales[owner] = name
        hidden = set(self._scales.values())
        self._names = sorted(name for name in places if name not in hidden)

    def __getitem__(self, name: str) -> ServedTensor:
        """Return a tensor.

        Raises:
            Fp8Error: Its bytes are not those that were exported.
        """
        if name not in self._places or name in self._scales.values():
            raise KeyError(name)
        data, scale = self._read(name), self._scales.get(name)
        fmt = _CODES.get(self._places[name][1].dtype)
        stored = None if scale is None else self._read(scale)
        if stored is not None and stored.dtype != np.uint8:
            stored = stored.view(np.uint8) if stored.dtype.name == "float8_e8m0fnu" else stored.astype(np.float32)
        return ServedTensor(name=name, data=data if fmt is None else data.view(np.uint8), scale=stored, format=fmt)

    def __iter__(self) -> Iterator[str]:
        """Yield names, sorted."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors, scales not counted."""
        return len(self._names)

    def _read(self, name: str) -> NDArray[Any]:
        folder, place = self._places[name]
        data = read_tensor(folder, place)
        saved = self.notes.get("crc32", {}).get(name)
        if saved is not None and zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data) != saved:
            raise Fp8Error(
                f"{folder / place.file} has changed since it was exported: the bytes of {name} are others. Use another "
                "copy."
            )
        return data


def read_for_serving(path: str | Path) -> ServedCheckpoint:
    """Open a checkpoint in any of the layouts of `export_for_serving`, whoever wrote it.

    Args:
        path: A folder, or one file in the safetensors format.

    Raises:
        Fp8Error: There is none, a file is cut off or damaged, or one that the index names is missing.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    files = _files_of(path)
    places: dict[str, tuple[Path, Place]] = {}
    for file in files:
        if not file.is_file():
            raise Fp8Error(f"{path} is not whole: {file.name} is missing. Use another copy.")
        found, _ = read_header(file)
        places.update({name: (folder, place) for name, place in found.items()})
    inside = path.is_dir()
    config = _json(folder / "config.json").get("quantization_config", {}) if inside else {}
    return ServedCheckpoint(path, places, config, _json(folder / NOTES) if inside else {})


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.is_file():
            raise Fp8Error(f"There is no checkpoint {str(path)!r}: give a folder or a file in the safetensors format.")
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = _json(index).get("weight_map", {}).values()
        return [path / name for name in sorted(set(named))]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise Fp8Error(f"{path} holds no file in the safetensors format.")
    return files


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise Fp8Error(f"{file} is cut off or damaged: it is no JSON.") from error
    return content if isinstance(content, dict) else {}
