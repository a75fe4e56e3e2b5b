"""`do_together`: files are written and read by many ranks, and all of them fail or none does."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fp8_common._errors import Fp8Error

T = TypeVar("T")


def is_first_rank() -> bool:
    """Return whether this is the rank that does what only one does."""
    return not dist.is_initialized() or dist.get_rank() == 0


def my_turn(group: dist.ProcessGroup | None = None, *, alone: bool = False) -> tuple[int, int]:
    """Return this rank and the number of ranks among which work is divided."""
    return (0, 1) if alone or not dist.is_initialized() else (dist.get_rank(group), dist.get_world_size(group))


def do_together(work: Callable[[], T], group: dist.ProcessGroup | None = None, *, alone: bool = False) -> list[T]:
    """Do `work` on every rank, and return what it gave on each; if it fails anywhere, all ranks raise.

    Args:
        work: What this rank does. Its result is pickled.
        group: The ranks, which all call this; None stands for all.
        alone: This process works for itself, whatever ranks there are.

    Raises:
        Fp8Error: An `Fp8Error` or an `OSError` stopped a rank; the first of those ranks gives the message.
    """
    done: T | None = None
    problem: str | None = None
    try:
        done = work()
    except (Fp8Error, OSError) as error:
        problem = str(error)
    told = (problem, done)
    if not alone and dist.is_initialized():
        everyone: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, told, group=group)
    else:
        everyone = [told]
    problems = [problem for problem, _ in everyone if problem is not None]
    if problems:
        raise Fp8Error(problems[0])
    return [result for _, result in everyone]
