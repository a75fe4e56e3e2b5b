"""Which bytes of an array changed, in few bytes: none, all, a bitmap or gaps between places, and the new bytes."""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def encode_changes(old: Bytes, new: Bytes) -> tuple[str, int, bytes]:
    """Return how the changes are written, their number, and the bytes; the shortest way is taken.

    Args:
        old: uint8 [n].
        new: uint8 [n].
    """
    places = np.flatnonzero(old != new)
    count = places.size
    if not count:
        return "same", 0, b""
    gaps = _gaps(places)
    sizes = {"all": new.size, "bitmap": -(-new.size // 8) + count, "gaps": gaps.size + count}
    way = min(sizes, key=lambda name: sizes[name])
    if way == "all":
        return way, count, new.tobytes()
    where = gaps if way == "gaps" else np.packbits(old != new)
    return way, count, where.tobytes() + new[places].tobytes()


def apply_changes(old: Bytes, way: str, count: int, data: bytes) -> Bytes:
    """Return the new bytes; `old` stays as it is.

    Raises:
        ValueError: `data` is nothing that `encode_changes` wrote for bytes of this length.
    """
    content = np.frombuffer(data, np.uint8)
    if way == "same" and not count and not content.size:
        return old
    if way == "all" and content.size == old.size:
        return content.copy()
    if way not in ("bitmap", "gaps") or not 0 < count <= content.size:
        raise ValueError(f"changes written as {way!r}")
    where, values = content[: content.size - count], content[content.size - count :]
    if way == "bitmap":
        places = np.flatnonzero(np.unpackbits(where, count=old.size))
    else:
        places = np.cumsum(where, dtype=np.int64)[where != _MORE] + np.arange(np.count_nonzero(where != _MORE))
    if places.size != count or places[-1] >= old.size:
        raise ValueError("places outside of the tensor")
    new = old.copy()
    new[places] = values
    return new


_MORE = 255
"""A gap byte that says: this many, and the next byte adds to it."""


def _gaps(places: NDArray[np.int64]) -> Bytes:
    """Return the unchanged elements before each place, as bytes that add up until one is below 255."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _MORE + 1) - 1
    written = np.full(ends[-1] + 1, _MORE, np.uint8)
    written[ends] = gaps % _MORE
    return written
