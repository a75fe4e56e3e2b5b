"""A reader for the index of a `torch.distributed.checkpoint` folder that runs no code from it.

The index (`.metadata`) is a pickle. Unpickling may call any function that the file names, and a damaged file raises any
exception; here only the classes of an index are found, and every failure is an `Fp8Error`.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from fp8_common._errors import Fp8Error
from fp8_common.torch._checksums import check_index

_METADATA = Metadata.__module__
# What an index holds besides the classes of `_METADATA` and torch's dtypes, over the supported torch versions.
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    # where Python 3.13 defines the paths of `pathlib`
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
}


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that finds the classes of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # The base class resolves dots as attributes: "os.system" would be found in any module that imports os.
        if "." not in name:
            found = super().find_class(module, name) if module in {_METADATA, "torch"} else None
            # Classes defined there only: the module also holds what it imports, such as functions of other modules.
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
        content = io.BytesIO(file.read_bytes())
        metadata = _IndexUnpickler(content).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        # Checked here because reading would use these as a file name and a range of bytes.
        for place in (metadata.storage_data or {}).values():
            if not (isinstance(place.relative_path, str) and type(place.offset) is type(place.length) is int):
                raise TypeError("an entry names no file and range of bytes")
        check_index(content.getvalue(), content.tell(), metadata)
    # Every exception: which one a damaged pickle raises depends on the byte that is wrong.
    except Exception as error:
        raise Fp8Error(f"{file} is damaged ({type(error).__name__}: {error}). Use another checkpoint.") from error
    return metadata
