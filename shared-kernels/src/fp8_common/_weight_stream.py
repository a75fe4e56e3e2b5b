"""`WeightStream` and `WeightCopy`: FP8 weights that follow those of a training, by messages of what has changed.

A message is bytes, for any transport. It says after which message it comes, and the checksums before and after of the
weights that it changes: applied to others it is refused, and nothing changes.
"""

import json
import struct
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_common._changed_bytes import apply_changes, encode_changes
from fp8_common._errors import Fp8Error

Weights = Mapping[str, NDArray[Any]]
"""Codes and scales by name: arrays of any dtype and shape, compared byte by byte."""

_MAGIC = b"fp8stream1"
_HEAD = struct.Struct("<II")  # length of the JSON header, CRC-32 of everything after these eight bytes


class WeightStream:
    """The sender: remembers what it sent last, and writes what differs.

    Args:
        keep: How many messages to keep for copies that missed some.

    Attributes:
        sequence: Number of the last message; 0 before the first.
    """

    def __init__(self, *, keep: int = 8) -> None:
        self.sequence = 0
        self._sent: dict[str, NDArray[Any]] = {}
        self._messages: deque[tuple[int, bytes]] = deque(maxlen=keep)

    def message(self, weights: Weights) -> bytes:
        """Return the next message: everything the first time, then what has changed since the last one.

        Raises:
            Fp8Error: Names, shapes or dtypes are others than before.
        """
        if not self.sequence:
            self._sent = {name: np.array(array) for name, array in weights.items()}
            self.sequence = 1
            return self._keep(self.full())
        kinds = [{name: (a.shape, a.dtype.str) for name, a in each.items()} for each in (self._sent, weights)]
        if kinds[0] != kinds[1]:
            raise Fp8Error(
                "The weights have other names, shapes or dtypes than those that this WeightStream sent before. Make a "
                "new one for another model."
            )
        entries, data = [], []
        for name, array in weights.items():
            old, new = _flat(self._sent[name]), _flat(np.asarray(array))
            way, count, changes = encode_changes(old, new)
            if way != "same":
                entries.append([name, way, count, len(changes), zlib.crc32(old.data), zlib.crc32(new.data)])
                data.append(changes)
        self._sent = {name: np.array(array) for name, array in weights.items()}
        self.sequence += 1
        return self._keep(_pack({"kind": "changes", "sequence": self.sequence, "tensors": entries}, data))

    def full(self) -> bytes:
        """Return everything as of the last message, for a copy that is new or has lost its place.

        Raises:
            Fp8Error: There was no message yet.
        """
        if not self.sequence:
            raise Fp8Error("This WeightStream has sent nothing yet. Call message(weights) first.")
        entries = [[n, a.dtype.name, list(a.shape), a.nbytes, zlib.crc32(_flat(a).data)] for n, a in self._sent.items()]
        header = {"kind": "full", "sequence": self.sequence, "tensors": entries}
        return _pack(header, [_flat(array).tobytes() for array in self._sent.values()])

    def since(self, sequence: int) -> list[bytes]:
        """Return the messages after `sequence`, to be applied in order; one full message if they are not kept."""
        if sequence == self.sequence:
            return []
        missed = [message for number, message in self._messages if number > sequence]
        return missed if 0 < sequence == self.sequence - len(missed) else [self.full()]

    def _keep(self, message: bytes) -> bytes:
        self._messages.append((self.sequence, message))
        return message


class WeightCopy:
    """The receiver: arrays that follow a `WeightStream`.

    Attributes:
        sequence: Number of the last message that was applied; 0 before the first.
        weights: Arrays by name; they are replaced, never written to.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.weights: dict[str, NDArray[Any]] = {}

    def apply(self, message: bytes) -> None:
        """Take over what a message says, all of it or nothing.

        Raises:
            Fp8Error: It is damaged, belongs to other weights, or another message comes before it; nothing changed.
        """
        header, data = _unpack(message)
        try:
            taken = self._full(header, data) if header["kind"] == "full" else self._changes(header, data)
        except Fp8Error:  # a ValueError too, and says all there is to say
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise Fp8Error(f"The message is damaged ({error}), and nothing was changed. Ask for a full one.") from error
        self.weights, self.sequence = (
            {**self.weights, **taken} if header["kind"] != "full" else taken,
            header["sequence"],
        )

    def _full(self, header: dict[str, Any], data: memoryview) -> dict[str, NDArray[Any]]:
        taken = {}
        for name, dtype, shape, size, crc in header["tensors"]:
            content, data = data[:size], data[size:]
            if zlib.crc32(content) != crc:
                raise ValueError(f"{name} has another checksum")
            taken[name] = np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
        return taken

    def _changes(self, header: dict[str, Any], data: memoryview) -> dict[str, NDArray[Any]]:
        number = header["sequence"]
        if number != self.sequence + 1:
            raise Fp8Error(
                f"Message {number} follows message {number - 1}, and this copy is at {self.sequence}. Apply what "
                f"WeightStream.since({self.sequence}) returns; nothing was changed."
            )
        taken = {}
        for name, way, count, size, before, after in header["tensors"]:
            content, data = data[:size], data[size:]
            own = self.weights.get(name)
            if own is None or zlib.crc32(_flat(own).data) != before:
                raise Fp8Error(
                    f"The message changes other weights than these: {name} is not what it was made for. Ask for a full "
                    "one; nothing was changed."
                )
            new = apply_changes(_flat(own), way, count, bytes(content))
            if zlib.crc32(new.data) != after:
                raise ValueError(f"{name} has another checksum")
            taken[name] = new.view(own.dtype).reshape(own.shape)
        return taken


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pack(header: dict[str, Any], data: list[bytes]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    body = text + b"".join(data)
    return _MAGIC + _HEAD.pack(len(text), zlib.crc32(body)) + body


def _unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    start = len(_MAGIC) + _HEAD.size
    if message[: len(_MAGIC)] != _MAGIC or len(message) < start:
        raise Fp8Error("These bytes are no message of a WeightStream, and nothing was changed.")
    length, crc = _HEAD.unpack_from(message, len(_MAGIC))
    body = memoryview(message)[start:]
    if zlib.crc32(body) != crc or length > len(body):
        raise Fp8Error("The message is cut off or damaged, and nothing was changed. Ask for it again.")
    return json.loads(bytes(body[:length])), body[length:]
