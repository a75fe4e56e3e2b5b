"""The text that the demos train on: its bytes, which of them are held out, the windows of a batch."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8_common import Fp8Error

STDLIB = "python-stdlib"
LEAST_BYTES = 1 << 16
MOST_BYTES = 1 << 27
# One block in HELD_OUT_EVERY is never trained on. Blocks, not the tail of the files: the standard library's last
# files (xml, zipfile) are unlike its first ones.
BLOCK_BYTES = 4096
HELD_OUT_EVERY = 10
# Tests, other people's packages, and the one file that says how this Python was built.
NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
BUILD_FACTS = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes to validate on.

    Attributes:
        label: what the report calls the data; `python-stdlib`, or the path as it was given.
        train: uint8 bytes, shape (n,).
        held_out: uint8 bytes, shape (m,), never part of a batch of `train`.
        digest: SHA-256 of all bytes in hexadecimal; equal digests mean equal data.
    """

    label: str
    train: np.ndarray
    held_out: np.ndarray
    digest: str

    @property
    def size(self) -> int:
        """Number of bytes, held-out ones included."""
        return len(self.train) + len(self.held_out)

    def batch(self, *, seed: int, step: int, rank: int, rows: int, length: int) -> np.ndarray:
        """Return the training windows of one step on one rank.

        A pure function of its arguments, so a resumed run sees the same batches, and two runs with one seed too.

        Returns:
            uint8, shape (rows, length + 1): the inputs are all but the last column, the targets all but the first.
        """
        random = np.random.default_rng([seed, step, rank])
        return _windows(self.train, random.integers(0, len(self.train) - length, rows), length)

    def held_out_batches(self, *, batches: int, rank: int, ranks: int, rows: int, length: int) -> Iterator[np.ndarray]:
        """Yield one rank's share of `batches * ranks * rows` windows spread evenly over the held-out bytes.

        Yields:
            uint8, shape (rows, length + 1), as from `batch`.
        """
        last = len(self.held_out) - length - 1
        starts = np.linspace(0, last, batches * ranks * rows).astype(np.int64)
        for mine in starts.reshape(batches, ranks, rows)[:, rank]:
            yield _windows(self.held_out, mine, length)


def load_corpus(data: str | Path | None = None) -> Corpus:
    """Read a file, every text file below a folder, or (None) the source of Python's standard library.

    In a folder, hidden names and files with a NUL byte in their first 8 KiB are left out. Files are joined in the
    order of their paths; reading stops after 128 MiB.

    Raises:
        Fp8Error: there is nothing at `data`, it cannot be read, or it is less than 64 KiB.
    """
    if data is None:
        root, label = Path(sysconfig.get_path("stdlib")), STDLIB
        paths = _stdlib_files(root)
    else:
        root, label = Path(data), str(data)
        if not root.exists():
            raise Fp8Error(f"There is no file or folder {label!r} to train on; give --data another path.")
        paths = _folder_files(root) if root.is_dir() else [root]
    try:
        content = _join(paths)
    except OSError as error:
        raise Fp8Error(f"The data {label!r} cannot be read ({error.strerror}); give --data another path.") from error
    if len(content) < LEAST_BYTES:
        raise Fp8Error(
            f"{label!r} holds {len(content):,} bytes of text, and the demo needs {LEAST_BYTES:,} to train on some "
            "and hold others out; give --data a larger file or folder."
        )
    return split(content, label)


def split(content: bytes, label: str) -> Corpus:
    """Hold out every tenth block of 4 KiB; equal bytes are split the same everywhere.

    Args:
        content: at least ten blocks.
        label: the name in the report.
    """
    codes = np.frombuffer(content, np.uint8)
    held_out = np.arange(len(codes)) // BLOCK_BYTES % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(
        label=label,
        train=codes[~held_out],
        held_out=codes[held_out],
        digest=hashlib.sha256(content).hexdigest(),
    )


def _stdlib_files(root: Path) -> list[Path]:
    files = _folder_files(root, but=NOT_STDLIB)
    return [path for path in files if path.suffix == ".py" and BUILD_FACTS not in path.name]


def _folder_files(root: Path, but: frozenset[str] = frozenset()) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".") and name not in but]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _join(paths: list[Path]) -> bytes:
    parts, size = [], 0
    for path in paths:
        if size >= MOST_BYTES:
            break
        part = path.read_bytes()
        if len(paths) == 1 or b"\0" not in part[:8192]:
            parts.append(part)
            size += len(part)
    return b"".join(parts)[:MOST_BYTES]


def _windows(codes: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return codes[starts[:, None] + np.arange(length + 1)]
