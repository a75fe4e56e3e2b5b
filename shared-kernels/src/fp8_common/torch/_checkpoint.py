"""Decides how the index of a checkpoint's folder is read: as data, without running what it names.

`torch.distributed.checkpoint` keeps the index as a pickle, and reads it as one. A pickle may call any function, and a
damaged one raises any exception.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fp8_common._errors import Fp8Error

_METADATA = Metadata.__module__
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
}


class _IndexUnpickler(pickle.Unpickler):
    """Finds the classes that an index is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # a dotted name walks through attributes: "os.system" would be found in a module that imports os
        if "." not in name:
            found = super().find_class(module, name) if module in {_METADATA, "torch"} else None
            of_metadata = isinstance(found, type) and found.__module__ == _METADATA
            if of_metadata or isinstance(found, torch.dtype):
                return found
            if (module, name) in _OTHERS:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds")


def read_metadata(folder: str | Path) -> Metadata:
    """Return the index of a checkpoint of `torch.distributed.checkpoint`.

    Args:
        folder: Where `torch.distributed.checkpoint.save` wrote.

    Raises:
        Fp8Error: There is no index, it is damaged, or it names something that an index does not hold.
    """
    file = Path(folder) / ".metadata"
    if not file.is_file():
        raise Fp8Error(f"{folder} holds no whole checkpoint: .metadata is missing. Was saving interrupted?")
    try:
        with file.open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        for place in (metadata.storage_data or {}).values():
            if not (isinstance(place.relative_path, str) and type(place.offset) is type(place.length) is int):
                raise TypeError("a place in a file is none")
    # not fewer: which exception a damaged pickle raises depends on the byte
    except Exception as error:
        raise Fp8Error(f"{file} is damaged ({type(error).__name__}: {error}). Use another checkpoint.") from error
    return metadata
