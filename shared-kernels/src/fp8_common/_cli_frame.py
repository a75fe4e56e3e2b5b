"""The frame of the command `fp8`: every end that can be expected is one sentence and an exit code."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from fp8_common._errors import Fp8Error, Fp8UnsupportedError

UNSUPPORTED, REFUSED = 1, 2
READER_GONE = 128 + 13
"""What a shell reports of a program that SIGPIPE ended."""


class Parser(argparse.ArgumentParser):
    """Answers bad arguments with one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave."""
        self.exit(REFUSED, f"{self.prog}: {message.rstrip('.')}. See {self.prog} --help.\n")


def framed(name: str, run: Callable[[], int]) -> int:
    """Return `run()`, or the exit code of what stopped it, which is told on stderr in one sentence.

    Args:
        name: The command, as the sentence begins.
        run: The command's work; it writes to standard output.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # here, not while the interpreter ends, where an error would be a traceback
    except BrokenPipeError:  # `fp8 formats | head -1`: the reader has what it wanted
        _discard_output()
        return READER_GONE
    except (Fp8Error, ModuleNotFoundError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return UNSUPPORTED if isinstance(error, (Fp8UnsupportedError, ModuleNotFoundError)) else REFUSED
    except OSError as error:
        _discard_output()
        place = f" to {error.filename!r}" if error.filename else ""
        sys.stderr.write(f"{name}: the output cannot be written{place} ({error.strerror or error}).\n")
        return REFUSED


def _discard_output() -> None:
    """Let the interpreter flush what is left at its end into nothing, where it would fail again."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
