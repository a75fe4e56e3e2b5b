"""Random sequences of operations on a model whose weights are gathered in FP8, against a high-precision gather.

Recipes and shapes are random too. 20 programs by default, 500 with --full. Hypothesis makes a program that fails as
short as it can be and prints it; put it in `FOUND` to run it alone, and leave it there once it is mended.
"""

import hypothesis
import pytest
import torch  # noqa: F401 printed programs name it

from tests.helpers.fsdp_programs import PROGRAMS, Program, Run
from tests.helpers.ranks import RankError

SECONDS = 60.0
"""For one program on all ranks: what takes longer, waits for ever."""

TRAIN, STEP = ("train", 1, False), ("step", None)
FOUND = {
    "a weight frozen under delayed scaling kept the scale of its last change": Program(
        ranks=1, operations=(TRAIN, STEP, ("freeze", 1), TRAIN, STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "edits of sharded plain weights, which local tensors do not count, left delayed scales as they were": Program(
        ranks=2, operations=(TRAIN, STEP, ("edit", "mul", 8.0), TRAIN, STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "an edit before a step counted as a part of it where nothing is gathered in FP8": Program(
        ranks=2, operations=(TRAIN, ("edit", "mul", 8.0), STEP, TRAIN, STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "the first edit came before any forward": Program(
        ranks=2, copies=True, operations=(("edit", "view", 0.75), TRAIN, STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "a gather by unshard() counted as a use of weights in training": Program(
        ranks=2, operations=(TRAIN, STEP, ("unshard",), STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "a first forward without gradients counted as a use of weights in training": Program(
        ranks=2, operations=(("evaluate", "no_grad"), STEP, TRAIN), recipe="tensorwise_delayed"
    ),
    "the flag for gradient synchronization was read before the backward that it concerns": Program(
        ranks=2,
        operations=(("train", 2, True), ("snapshot",), ("restore",), STEP, TRAIN, STEP, TRAIN),
        recipe="tensorwise_delayed",
    ),
    "a step of one rank before any forward let only that rank notice an edit": Program(
        ranks=2, operations=(("step", 0), ("edit", "view", 0.5), TRAIN), recipe="tensorwise_delayed"
    ),
    "a step of one rank and a synchronization before any forward let only that rank notice an edit": Program(
        ranks=2,
        operations=(("step", 0), ("edit", "view", 0.5), ("synchronize", "history"), TRAIN),
        recipe="tensorwise_delayed",
    ),
    "an edit through a state dict after a step that one rank skipped was refused": Program(
        ranks=2, operations=(TRAIN, ("step", 1), ("edit", "state_dict", 0.5), TRAIN)
    ),
    "an edit through a state dict of weights that nobody gathers left delayed scales as they were": Program(
        ranks=0, operations=(TRAIN, STEP, ("edit", "state_dict", 8.0), TRAIN), recipe="tensorwise_delayed"
    ),
    "an edit through a state dict by a power of two of row-wise weights went unseen": Program(
        ranks=1, operations=(TRAIN, STEP, TRAIN, ("edit", "state_dict", 8.0), TRAIN), recipe="rowwise"
    ),
    "an edit through a state dict before a step counted as a part of it": Program(
        ranks=2, operations=(TRAIN, ("edit", "state_dict", 0.5), STEP, TRAIN, TRAIN), recipe="tensorwise_delayed"
    ),
}
"""What went wrong in a program that a random choice found, and that program."""


def on_rank(rank, world_size, program):
    return Run(program, rank).run()


def failure_of(run_ranks, program):
    """Return what goes wrong in a program, on the first rank where something does; None if nothing does."""
    try:
        if not program.ranks:
            return Run(program, 0).run()
        answers = run_ranks(program.ranks, on_rank, program, timeout=SECONDS)
    except (Exception, RankError) as error:
        return str(error) or repr(error)
    return next((answer for answer in answers if answer), None)


@pytest.mark.distributed
@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_failed_once(run_ranks, program):
    why = failure_of(run_ranks, program)
    assert why is None, why


@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_random_programs_equal_a_high_precision_gather(run_ranks, full):
    @hypothesis.settings(
        max_examples=500 if full else 20,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        derandomize=not full,
        deadline=None,
        database=None,
    )
    @hypothesis.given(program=PROGRAMS)
    def check(program):
        why = failure_of(run_ranks, program)
        assert why is None, why

    check()
