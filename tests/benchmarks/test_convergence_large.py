"""The long runs: names, corpus, regimes and table; and that a run which is stopped goes on bit for bit."""

import math
import time

import pytest

from benchmarks import convergence_large as large
from benchmarks.convergence_large_rank import SPIKE, SPIKE_STEPS, rate_factor
from fp8_common import Fp8Error
from tests.helpers.repository import ROOT

TINY = {"steps": 4, "dim": 32, "layers": 1, "ranks": 2, "rows": 2, "checkpoint_every": 2}


def test_comparisons_are_whole_one_after_the_other():
    assert large.names(2)[: len(large.WAYS)] == [f"python-stdlib/plain/{way}/0" for way in large.WAYS]
    assert len(large.names(2)) == 2 * 2 * 3 * 6
    dim, layers = large.SIZES["dim"], large.SIZES["layers"]
    assert 12 * dim**2 * layers + 2 * 256 * dim >= 5_000_000, "parameters"


def test_the_made_corpus_is_right_and_always_the_same():
    lines = large.arithmetic(50).splitlines()
    assert lines == large.arithmetic(50).splitlines()
    assert {line.split()[1] for line in lines} == set("+-*")
    for line in lines:
        left, right = line.split(" = ")
        assert eval(left) == int(right), line


def test_the_rate_is_spiked_for_a_few_steps_after_the_warm_up():
    spiked = [step for step in range(600) if rate_factor(step, 600, "spikes") == SPIKE]
    assert spiked == [start + step for start in (100, 200, 300, 400, 500) for step in range(SPIKE_STEPS)]
    assert [step for step in range(1000) if rate_factor(step, 3000, "spikes") == SPIKE] == list(range(500, 510))
    # shorter than its spikes are many, as in the tests below
    assert [rate_factor(step, 4, "spikes") for step in range(4)] == [1, SPIKE, SPIKE, SPIKE]
    assert rate_factor(100, 600, "plain") == rate_factor(100, 600, "outliers") == 1


def test_the_table_says_what_broke_where_and_what_was_not_run():
    runs = {
        "arithmetic/plain/bf16/0": {"val_loss": 2.0, "diverged_at": None},
        "arithmetic/plain/rowwise/0": {"val_loss": 2.1, "diverged_at": None},
        "arithmetic/spikes/rowwise/0": {"val_loss": None, "diverged_at": 512},
    }
    assert large.table({"runs": runs}).splitlines() == [
        "| way | arithmetic, plain | arithmetic, spikes |",
        "|---|---|---|",
        "| bf16 | 2.0000 | not run |",
        "| rowwise | +5.00 % | diverged at step 512 |",
    ]


def test_checkpoints_in_the_repository_are_refused(tmp_path):
    with pytest.raises(Fp8Error, match="inside of the repository"):
        large.run_all(tmp_path / "r.json", ROOT / "somewhere", [], TINY, 1)


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["arithmetic/outliers/rowwise/0", "python-stdlib/spikes/bf16/0"])
def test_a_run_that_is_stopped_goes_on_bit_for_bit(name, tmp_path, monkeypatch, full):
    if not full:
        pytest.skip("three starts of two processes: run it with --full")
    monkeypatch.setattr(large, "ARITHMETIC_LINES", 6000)
    never = time.time() + 1e6
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    assert large.train(name, tmp_path / "parts", TINY, never, stop_at=3) is None
    rest, whole = (large.train(name, tmp_path / folder, TINY, never) for folder in ("parts", "whole"))
    assert (rest["losses"], rest["val_loss"]) == (whole["losses"], whole["val_loss"])
    assert all(math.isfinite(loss) for loss in whole["losses"])
    assert (whole["diverged_at"], len(whole["losses"])) == (None, 4)
