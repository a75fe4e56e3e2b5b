"""`Checkpoint`: a folder of safetensors files, read row by row.

A file (https://github.com/huggingface/safetensors) consists of 8 bytes with the length of the header, a JSON header
with dtype, shape and byte range of each tensor, and the bytes of the tensors, little-endian. The dtypes and shapes in
the header determine how a layer is quantized.
"""

import json
import math
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch.blocks import Block

BLOCK = 128
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """Header entry of a tensor, which begins at byte `begin`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of an index of the first dimension, or of a scalar."""
        return self.nbytes // max(1, self.shape[0]) if self.shape else self.nbytes


class Layout(NamedTuple):
    """Name, dtype and granularity of a weight's scales."""

    scale: str
    dtype: torch.dtype
    block: Block


class Checkpoint:
    """Folder with `config.json` and safetensors files.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        config: Content of `config.json`.
        entries: Header entries by tensor name.
        bytes_read: Bytes of tensors that were read so far.

    Raises:
        Fp8Error: If a file is missing or truncated, or has no safetensors header.
        Fp8UnsupportedError: If `quantization_config` specifies another format than E4M3 or other blocks than 128x128.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.bytes_read = Path(path), 0
        if not (self.path / "config.json").is_file():
            raise Fp8Error(f"{self.path} has no config.json: name the folder of a model in Hugging Face's layout.")
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            self._read_header(file)
        self._check_config()

    @cached_property
    def files(self) -> list[str]:
        """Names of the safetensors files."""
        index = self.path / INDEX
        if index.is_file():
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not paths:
            raise Fp8Error(f"{self.path} has no safetensors files.")
        return paths

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config`, empty if there is none."""
        return self.config.get("quantization_config") or {}

    def _read_header(self, file: str) -> None:
        path = self.path / file
        if not path.is_file():
            raise Fp8Error(f"{path} is named in {INDEX} and missing.")
        size, (length, header) = path.stat().st_size, header_of(path)
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + place for place in tensor["data_offsets"])
                if end > size:
                    raise Fp8Error(f"{path} is cut off: {name} ends at byte {end}, and the file at {size}.")
                self.entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), begin, end - begin)

    def _check_config(self) -> None:
        fmt, block = self.quantization.get("fmt", "e4m3"), self.quantization.get("weight_block_size")
        if fmt not in ("e4m3", "float8_e4m3fn") or block not in (None, [BLOCK, BLOCK]):
            raise Fp8UnsupportedError(
                f"quantization_config of {self.path} has fmt={fmt!r} and weight_block_size={block}: E4M3 codes with "
                f"one scale, scales of rows, or blocks of [{BLOCK}, {BLOCK}] can be loaded."
            )

    # ------------------------------------------------------------ scale layouts

    def layout(self, name: str) -> Layout | None:
        """Return a weight's scale layout from the header, None if unquantized.

        Raises:
            Fp8UnsupportedError: If the weight has other codes than E4M3, no scales, or scales of another layout. The
                message names the layer.
        """
        entry, layer = self.entries[name], name.removesuffix(".weight")
        if entry.dtype != "F8_E4M3":
            if entry.dtype not in ("F64", "F32", "F16", "BF16"):
                raise Fp8UnsupportedError(f"{layer}: codes of {entry.dtype} cannot be loaded, E4M3 can.")
            return None
        names = [f"{name}_scale_inv", f"{name}_scale", f"{layer}.scale", f"{layer}.qscale_weight"]
        scale = next((candidate for candidate in names if candidate in self.entries), None)
        if scale is None:
            raise Fp8UnsupportedError(f"{layer} has FP8 codes and no scales; looked for {', '.join(names)}.")
        dtype, shape = self.entries[scale].dtype, self.entries[scale].shape
        block = _block_of(entry.shape, shape)
        if dtype not in SCALE_DTYPES or block == "other":
            raise Fp8UnsupportedError(
                f"{layer}: codes {list(entry.shape)} cannot be loaded with scales {list(shape)} of {dtype}. They can "
                f"with one scale, scales of rows, or of blocks of {BLOCK}x{BLOCK}, in {', '.join(SCALE_DTYPES)}."
            )
        return Layout(scale, DTYPES[dtype], block)

    # ------------------------------------------------------------ bytes

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Read rows [first, last) of a tensor, and no other bytes.

        The result is on the CPU, in the file's dtype.
        """
        entry = self.entries[name]
        shape, begin, nbytes = entry.shape, entry.begin, entry.nbytes
        if shape and (first, last) != (0, None):
            rows = range(shape[0])[first:last]
            shape, begin, nbytes = (len(rows), *shape[1:]), begin + first * entry.row_bytes, len(rows) * entry.row_bytes
        self.bytes_read += nbytes
        read = np.fromfile(self.path / entry.file, dtype=np.uint8, count=nbytes, offset=begin)
        return torch.from_numpy(read).view(DTYPES[entry.dtype]).view(shape)

    def write(self, folder: Path, name: str, tensor: torch.Tensor, first: int = 0) -> None:
        """Write rows of a tensor to a folder that `begin_copy` has created.

        Args:
            folder: The folder.
            name: Name of the tensor.
            tensor: The rows, in the file's dtype.
            first: Index of the first row.

        Raises:
            Fp8Error: If the rows do not have the dtype and shape of the file.
        """
        entry = self.entries[name]
        rows = (first + len(tensor), *tensor.shape[1:]) if tensor.ndim else ()
        if tensor.dtype != DTYPES[entry.dtype] or rows[1:] != entry.shape[1:] or rows[:1] > entry.shape[:1]:
            raise Fp8Error(
                f"{name} is {entry.dtype} {list(entry.shape)} in the file; {tensor.dtype} {list(tensor.shape)} from "
                f"row {first} on cannot be written there."
            )
        data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        with (folder / entry.file).open("r+b") as file:
            file.seek(entry.begin + first * entry.row_bytes)
            file.write(data.data)

    def begin_copy(self, folder: Path, written: Iterable[str]) -> None:
        """Create a copy of this checkpoint without the values of some tensors.

        Headers, all other tensors and all other files are copied.

        Args:
            folder: Folder of the copy, which is created.
            written: Names of tensors that the caller writes later.

        Raises:
            Fp8Error: If `folder` is the folder of this checkpoint.
        """
        if folder.resolve() == self.path.resolve():
            raise Fp8Error(f"{folder} is the checkpoint that was loaded: save to another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        for other in self.path.iterdir():
            if other.is_file() and other.name not in self.files:
                shutil.copyfile(other, folder / other.name)
        for name in self.files:
            source = self.path / name
            with source.open("rb") as old, (folder / name).open("wb") as new:
                new.write(old.read(8 + header_of(source)[0]))
                new.truncate(source.stat().st_size)
        for name in sorted(self.entries.keys() - set(written)):
            self.write(folder, name, self.read(name))


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the length in bytes and the content of a safetensors header.

    Raises:
        Fp8Error: If the file does not begin with such a header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > path.stat().st_size:
                raise ValueError("its length is longer than the file")
            return length, json.loads(file.read(length))
        except ValueError as error:
            raise Fp8Error(f"{path} does not begin with a safetensors header: {error}.") from error


def _block_of(codes: tuple[int, ...], scales: tuple[int, ...]) -> Any:
    """Return the `Block` of scales from shapes, "other" if unsupported."""
    if len(scales) == 4 and scales[1] == scales[3] == 1:  # ModelOpt: [blocks of rows, 1, blocks of columns, 1]
        scales = scales[::2]
    if len(codes) == 2 and math.prod(scales) == 1:
        return None
    if scales in ((*codes[:-1], 1), codes[:-1]):
        return 1, 0
    if scales == (*codes[:-2], *(-(-size // BLOCK) for size in codes[-2:])):
        return BLOCK, BLOCK
    return "other"
