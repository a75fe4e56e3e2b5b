"""The end of a program that used gloo: flushed, and without finalizing the interpreter."""

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process without finalizing the interpreter.

    A gloo thread that still holds the tensors of the last collective would abort it there, about once in 50 runs on a
    busy machine: https://github.com/pytorch/pytorch/issues/190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
