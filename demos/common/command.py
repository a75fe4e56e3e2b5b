"""The demos' command line: a mistake is one sentence on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from fp8_common import Fp8Error, Fp8UnsupportedError

REFUSED = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, without the usage lines in front."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave."""
        self.exit(REFUSED, f"{message[:1].upper()}{message[1:]}; --help lists the options.\n")


def positive(text: str) -> int:
    """Read a whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number from 1 on, not {text!r}")
    return int(text)


def refusing(main: Callable[[], int]) -> int:
    """Return `main()`; what it refuses (an `Fp8Error` or `Fp8UnsupportedError`) is told in its own sentence."""
    try:
        return main()
    except (Fp8Error, Fp8UnsupportedError) as error:
        print(error, file=sys.stderr)
        return REFUSED
