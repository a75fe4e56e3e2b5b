"""Sequences of operations on a model whose weights are gathered in FP8, against a high-precision gather.

Whoever writes to weights, in whatever way, at whatever moment, on however many ranks: what is gathered is cast from
what they hold now. To read them changes nothing, and no rank waits for what another one alone did.

Random sequences, recipes and shapes too: 20 programs by default, 500 with --full. Hypothesis makes a program that fails
as short as it can be and prints it; put it in `FOUND` to run it alone, and leave it there once it is mended.
"""

import hypothesis
import pytest
import torch

from fsdp_drawn import ENDING, NAMED, PROGRAMS, Program
from fsdp_models import RECIPES, WIDTHS
from fsdp_programs import Run
from fsdp_writes import COLLECTIVES, EDITS, READERS
from tests.helpers.ranks import RankError

pytestmark = pytest.mark.distributed

SECONDS = 60.0
"""For one program on all ranks: what takes longer, waits for ever."""


def on_rank(rank, world_size, program):
    return Run(program, rank).run()


def check(run_ranks, ranks, *operations, **setting):
    """Fail with what goes wrong in a program, on the first rank where something does."""
    program = Program(ranks=ranks, operations=operations, **setting)
    why = failure_of(run_ranks, program)
    assert why is None, why


def failure_of(run_ranks, program):
    """Return what goes wrong in a program; None if nothing does."""
    try:
        if not program.ranks:
            return Run(program, 0).run()
        answers = run_ranks(program.ranks, on_rank, program, timeout=SECONDS)
    except (Exception, RankError) as error:
        return str(error) or repr(error)
    return next((answer for answer in answers if answer), None)


TRAIN, STEP, SYNCHRONIZE = ("train", 1, False), ("step", None), ("synchronize", "history")
TRAIN_LATE = ("train", 2, True)  # says between forward and backward that gradients are synchronized


# in this order, so that by default recipes whose scales the ranks agree on run on several
@pytest.mark.matrix(
    "each",
    ranks=[2, 3, 4, 1],
    widths=list(WIDTHS),
    recipe=[*RECIPES, *NAMED],
    dtype=[torch.float32, torch.bfloat16],
    reshard=[True, False],
)
def test_steps_equal_those_with_a_high_precision_gather(run_ranks, ranks, widths, recipe, dtype, reshard):
    setting = {"recipe": recipe, "widths": WIDTHS[widths], "dtype": dtype, "reshard": reshard, "optimizer": "adamw"}
    check(run_ranks, ranks, *(TRAIN, STEP) * 4, **setting)


# ---------------------------------------------------------------- what is written, and when

WRITES = {f"edit by {how}": ("edit", how, 8.0) for how in EDITS}
WRITES |= {f"load by {how}": ("load", how, 8.0) for how in ("copy", "assign", "to_empty")}
WRITES |= {f"collective {name}": ("collective", name) for name in COLLECTIVES}
WRITES |= {"edit on one rank": ("edit_on_one_rank", 1, 0.5)}
MOMENTS = {
    "after a step": (TRAIN, STEP),
    "after an explicit synchronization, when scales of torchao were stale": (TRAIN, STEP, SYNCHRONIZE),
    "after an evaluation": (TRAIN, STEP, ("evaluate", "no_grad")),
    "after the gathers of the next forward were started": (TRAIN, STEP, ("unshard",)),
    "before any forward": (),
    "before a step, of which it counted as a part": (TRAIN, STEP, TRAIN),
    "after a step of one rank before any forward: only that rank noticed it": (("step", 0),),
    "after a step of one rank and a synchronization before any forward": (("step", 0), SYNCHRONIZE),
    "after a step that one rank skipped": (TRAIN, ("step", 1)),
}


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*:FutureWarning")
@pytest.mark.matrix(
    "each",
    write=list(WRITES),
    moment=list(MOMENTS),
    recipe=["tensorwise_delayed", "tensorwise", "rowwise", "blockwise"],
    ranks=[2, 0, 3],
)
def test_no_weight_is_stale_any_writer_writes_to_it(run_ranks, write, moment, recipe, ranks):
    if write == "load by to_empty":  # which empties gradients and the buffers of delayed scales too
        moment, recipe = "after a step", "tensorwise"
    ranks = 2 if "collective" in write else ranks
    widths = (24, 40, 8, 24)  # even on two ranks, as collectives want
    check(run_ranks, ranks, *MOMENTS[moment], WRITES[write], TRAIN, STEP, *ENDING, recipe=recipe, widths=widths)


@pytest.mark.matrix("each", how=list(READERS), recipe=["tensorwise_delayed", "rowwise", "tensorwise"])
def test_reading_on_one_rank_changes_nothing(run_ranks, how, recipe):
    read = ("read", how, 0)
    step = (read, ("forward",), read, ("backward",), read, ("train", 2, False), read, STEP, read, SYNCHRONIZE, read)
    check(run_ranks, 2, *step * 2, *ENDING, recipe=recipe)


# ---------------------------------------------------------------- random programs, and what they found

FOUND = {
    "a weight frozen under delayed scaling kept the scale of its last change": (
        *(1, TRAIN, STEP, ("freeze", 1), TRAIN, STEP, TRAIN),
    ),
    "a gather by unshard() counted as a use of weights in training": (2, TRAIN, STEP, ("unshard",), STEP, TRAIN),
    "a first forward without gradients counted as a use of weights in training": (
        *(2, ("evaluate", "no_grad"), STEP, TRAIN),
    ),
    "the flag for gradient synchronization was read before the backward that it concerns": (
        *(2, TRAIN_LATE, ("snapshot",), ("restore",), STEP, TRAIN, STEP, TRAIN),
    ),
    "a rank skips a step, the gradient flag is set between forward and backward": (
        *(2, TRAIN_LATE, STEP, TRAIN_LATE, ("step", 1), TRAIN_LATE, STEP, TRAIN),
    ),
    "a rank skips a step, the next gathers are started before the forward": (
        *(2, TRAIN, STEP, ("unshard",), TRAIN, ("step", 1), ("unshard",), TRAIN, STEP, TRAIN),
    ),
    "the first step of weights that a load has put in the place of others did not count": (
        *(2, ("forward",), ("load", "assign", 0.5), STEP, ("forward",)),
    ),
    "a forward after a backward that raised was no forward to FSDP2": (
        *(2, ("forward",), ("fail_in_backward", 0, False), *ENDING),
    ),
}
"""What went wrong in a program that a random choice found: ranks, and operations under delayed scaling."""


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_failed_once(run_ranks, program):
    check(run_ranks, *program, recipe="tensorwise_delayed")


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
    def equal(program):
        why = failure_of(run_ranks, program)
        assert why is None, why

    equal()
