"""CRC-32 of every stored piece of a `torch.distributed.checkpoint` folder, kept in its index.

They stand in an attribute of the index, which torch reads over, and the index ends with a checksum of its own behind
its pickle. So a changed byte is noticed wherever it is.
"""

import pickle
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fp8_common._errors import Fp8Error

Checksums = dict[MetadataIndex, int]

ATTRIBUTE = "fp8_common_crc32"
"""The attribute of an index that holds checksums by piece."""

_CHUNK = 1 << 24
_MARK = b"crc32="


def checksums_in(metadata: Metadata) -> Checksums | None:
    """Return the checksums that were saved with a checkpoint; None for one that was saved without."""
    return getattr(metadata, ATTRIBUTE, None)


def checksums_of(folder: Path, metadata: Metadata, share: tuple[int, int] = (0, 1)) -> Checksums:
    """Return the checksums of what lies in the files.

    Args:
        folder: The checkpoint.
        metadata: Its index.
        share: This rank and the number of ranks, which divide the pieces.

    Raises:
        OSError: A file cannot be read.
    """
    return {index: _crc32(folder, metadata.storage_data[index]) for index in _pieces(metadata, share)}


def check_pieces(
    folder: Path, metadata: Metadata, share: tuple[int, int] = (0, 1), names: Collection[str] | None = None
) -> None:
    """Compare what lies in the files with the checksums of the index; nothing if it has none.

    Args:
        folder: The checkpoint.
        metadata: Its index.
        share: See `checksums_of`.
        names: Look at these tensors alone.

    Raises:
        Fp8Error: Bytes have changed; the message names tensor and file.
    """
    saved = checksums_in(metadata)
    if saved is None:
        return
    for index in _pieces(metadata, share):
        if names is not None and index.fqn not in names:
            continue
        place = metadata.storage_data[index]
        found = _crc32(folder, place)
        if found != saved.get(index):
            raise Fp8Error(
                f"{folder / place.relative_path} has changed since it was saved: the bytes of {index.fqn} there have "
                f"CRC-32 {found:08x}, and {saved.get(index, 0):08x} was saved. Nothing was loaded; use another "
                "checkpoint."
            )


def write_index(folder: Path, metadata: Metadata, parts: Iterable[Checksums]) -> None:
    """Write the index of a checkpoint again, with checksums."""
    setattr(metadata, ATTRIBUTE, {index: crc for part in parts for index, crc in part.items()})
    content = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content + _MARK + zlib.crc32(content).to_bytes(4, "little"))


def check_index(content: bytes, end: int, metadata: Any) -> None:
    """Compare an index with the checksum at its end.

    Args:
        content: The file.
        end: How long the pickle in it is.
        metadata: What was read from it.

    Raises:
        ValueError: It was saved with a checksum that is not there, or is another one.
    """
    if checksums_in(metadata) is None and end == len(content):
        return
    if content[end:] != _MARK + zlib.crc32(content[:end]).to_bytes(4, "little"):
        raise ValueError("it is not what was saved")


def _pieces(metadata: Metadata, share: tuple[int, int]) -> list[MetadataIndex]:
    """Return this rank's share of the pieces, in an order that all ranks share."""
    pieces = metadata.storage_data or {}
    ordered = sorted(pieces, key=lambda index: (pieces[index].relative_path, pieces[index].offset))
    rank, ranks = share
    return ordered[rank::ranks]


def _crc32(folder: Path, place: Any) -> int:
    crc, left = 0, place.length
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        while left and (chunk := file.read(min(left, _CHUNK))):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    return crc
