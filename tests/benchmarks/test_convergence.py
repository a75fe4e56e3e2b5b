"""The runner of training runs: its queue, that a run which was killed goes on bit for bit, and the tables of runs."""

import argparse
import fcntl
import functools
import itertools
import json
import multiprocessing
import re
import signal
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed: tables come with their pictures")

from benchmarks import _accumulation, _plan, _runs, convergence, figures
from benchmarks._accumulation import sums
from benchmarks._intervals import Estimate, Fit, power, quantile, seeds_for
from benchmarks._plan import ANNEAL, FAST, FULL, RECIPES, TO_ZERO, WIRES, Spec, controlled, finished, queue
from benchmarks._training import Training, learning_rate
from fp8_torch_fsdp import DelayedState
from fp8_torch_fsdp.scales.model_hooks import forget_sync
from tests.helpers.ranks import PRELOADED
from tests.helpers.repository import ROOT

CORPUS = functools.cache(convergence.load_corpus)
TINY = {"question": "test", "seed": 0, "dim": 128, "layers": 1, "rows": 2}


def arguments(folder, *specs, every=1e9):
    """Return what the runner is told: state and results in `folder`, and seconds between checkpoints."""
    places = ["--state", str(folder / "state"), "--results", str(folder / "results"), "--device", "cpu"]
    wanted = [part for spec in specs for part in ("--spec", json.dumps(asdict(spec)))]
    return ["convergence", *places, "--checkpoint-seconds", str(every), *wanted]


@pytest.fixture
def train(monkeypatch):
    """`train(folder, *specs)` runs the runner in this process and returns its results, less what no run repeats."""
    threads = torch.get_num_threads()

    def run(folder, *specs, **options):
        monkeypatch.setattr(sys, "argv", arguments(folder, *specs, **options))
        monkeypatch.setattr(convergence, "load_corpus", CORPUS)
        assert convergence.main() == 0
        found = [
            one
            for path in sorted((folder / "results").glob("*.jsonl"))
            for one in finished(folder / "results", path.stem)
        ]
        return [{name: value for name, value in one.items() if name != "cpu_seconds"} for one in found]

    yield run
    torch.set_num_threads(threads)


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_goes_on_bit_for_bit(train, tmp_path, capsys, monkeypatch):
    # of all recipes the one with state of its own
    spec = Spec(**TINY, recipe="tensorwise_delayed", steps=6)
    monkeypatch.setattr(sys, "argv", arguments(tmp_path / "killed", spec, every=0))
    multiprocessing.set_forkserver_preload(PRELOADED)
    child = multiprocessing.get_context("forkserver").Process(target=convergence.main)
    child.start()
    while child.is_alive() and not list((tmp_path / "killed/state").glob("*.pt")):
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not list((tmp_path / "killed/results").glob("*.jsonl"))
    (killed,) = train(tmp_path / "killed", spec, every=0)
    # had it begun anew, both runs would be equal for no reason
    assert 1 <= int(re.search(r"from step (\d+) of 6", capsys.readouterr().out)[1]) < 6
    (uninterrupted,) = train(tmp_path / "whole", spec)
    assert killed == uninterrupted
    assert len(killed["held_out"]) == 6
    assert killed["held_out"][-1] < killed["held_out"][0]
    assert not list((tmp_path / "killed/state").glob("*.pt")), "checkpoints of a finished run are of no more use"


def test_processes_with_each_other_make_different_runs(train, tmp_path):
    (tmp_path / "state").mkdir()
    taken, free = (Spec(**TINY | {"seed": seed}, recipe="bf16", steps=1) for seed in (0, 1))
    with (tmp_path / f"state/{taken.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (made,) = train(tmp_path, taken, free)
    assert made["spec"] == asdict(free)


def test_a_run_that_another_process_finished_meanwhile_is_not_made_again(train, tmp_path, monkeypatch):
    spec = Spec(**TINY, recipe="bf16", steps=1)
    train(tmp_path, spec)
    monkeypatch.setattr(convergence, "finish", lambda *_: pytest.fail("it was begun"))
    # what was missing when this process began
    options = argparse.Namespace(state=tmp_path / "state", results=tmp_path / "results", device="cpu", minutes=1)
    assert convergence.make([spec], options) == 0


def test_a_wire_of_codes_changes_what_is_trained_and_little_of_it(train, tmp_path):
    runs = train(tmp_path, *(Spec(**TINY, recipe=recipe, steps=2) for recipe in ("bf16", *WIRES[:3])))
    losses = [run["held_out"][-1] for run in runs]
    assert len(set(losses)) == 4, "each wire sends something else"
    assert max(losses) - min(losses) < 0.01 * min(losses)


def test_branches_start_where_the_trunk_of_their_seed_ends_and_controls_move_apart(train, tmp_path):
    small = {"dim": 128, "layers": 1, "rows": 2, "steps": 1, "schedule": ANNEAL, "trunk": 2}
    specs = [Spec(question="anneal", recipe="bf16", seed=0, twin=twin, **small) for twin in range(2)]
    specs += [Spec(question="anneal", recipe=recipe, seed=0, **small) for recipe in ("tensorwise_delayed", "rowwise")]
    with pytest.raises(AssertionError, match="1 == 0"):
        train(tmp_path, *specs)  # no trunk: nothing is made from other weights
    assert not finished(tmp_path / "results", "anneal")
    runs = train(tmp_path, specs[0].start, *specs)
    (whole,) = train(tmp_path / "whole", Spec(**TINY, recipe="bf16", steps=2, schedule="trunk"))
    losses = {_runs.label(run["spec"]): run["training"] for run in runs if run["spec"]["question"] == "anneal"}
    assert len(set(losses.values())) == 4
    assert max(losses.values()) - min(losses.values()) < 0.01 * min(losses.values())
    assert next(run["training"] for run in runs if run["spec"]["question"] == "trunk") == whole["training"]


def test_what_a_graph_replays_of_delayed_scaling_gives_the_losses_of_its_hooks():
    """A replay runs no hook of a forward: scales are synchronized in it, and the pass before it is no step."""
    losses = []
    for replays in (False, True):
        run = Training(Spec(**TINY, recipe="tensorwise_delayed", steps=100), CORPUS(), "cpu")
        if replays:
            forget_sync(run.model)
            run.synchronizes, state = True, DelayedState(run.model)
            before = state.state_dict()
            run.windows.copy_(torch.from_numpy(run.batch(0).astype(np.int64)))
            run._forward_and_backward()
            state.load_state_dict(before)
        for _ in range(5):
            run.step()
        losses.append(run.losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("bits", "wanted"), [(13, 1.0), (14, 1 + 2.0**-14)])
def test_modelled_sums_are_cut_off_towards_zero_after_each_32_matmuls(bits, wanted):
    x = torch.tensor([1 / 32] * 32 + [2.0**-19] * 32 + [0.0] * 5)[None]
    ones = torch.ones(2, 69)
    for sign in (1, -1):
        assert sums(sign * x, ones, bits).tolist() == [[sign * wanted] * 2]
    first, second = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)), torch.ones(2, 40)
    torch.testing.assert_close(sums(first, second, 23), first @ second.t())


def test_fast_accumulation_is_modelled_where_the_configuration_asks_for_it():
    """Forward and gradients of experts; of dense layers, whose gradients are accumulated in full, the forward."""
    run = Training(Spec(**TINY, recipe=FAST, model="mixture", steps=3), CORPUS(), "cpu")
    asked = []

    def noted(a, b, bits):
        asked.append(bits)
        return a @ b.t()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_accumulation, "sums", noted)
        run.step()
        assert asked == [13] * (2 + 4 * 2 * 3), "forwards of two dense layers, all matmuls of four experts"
        asked.clear()
        Training(Spec(**TINY, recipe=FULL, model="mixture", steps=3), CORPUS(), "cpu").step()
        assert asked == []


def test_both_accumulations_train_a_mixture_alike_and_not_the_same(train, tmp_path):
    specs = [Spec(**TINY, recipe=recipe, model="mixture", steps=3) for recipe in ("bf16", FULL, FAST)]
    losses = [run["held_out"][-1] for run in train(tmp_path, *specs)]
    assert len(set(losses)) == 3
    assert max(losses) - min(losses) < 0.01 * min(losses)


def test_runs_of_another_schedule_are_not_mixed_in():
    usual = {"question": "recipes", "recipe": "bf16", "seed": 0}
    conditions = {_runs.condition(asdict(Spec(**usual, schedule=one))) for one in ("cosine", TO_ZERO)}
    assert len(conditions) == 2


def test_the_rate_of_a_protocol_run_ends_at_zero_linearly_over_the_last_fifth():
    rates = [learning_rate(step, 400, TO_ZERO) for step in range(400)]
    assert max(rates) == pytest.approx(1.5e-3, rel=0.02)
    falls = [before - after for before, after in itertools.pairwise(rates[320:])]
    assert falls == pytest.approx([rates[-1]] * 79)
    assert rates[320] == pytest.approx(1.5e-4)


PROGRAM = """
import numpy as np, torch
def windows(seed):
    return (np.random.default_rng(seed).integers(0, 32, (4, 1)) + 3 * np.arange(17)) % 32
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 32)
        self.inner, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.inner(hidden))
def task(seed):
    return Model(), lambda step: windows([seed, step]), [windows(9)]
"""


def test_a_model_of_the_user_is_measured_from_a_pilot(tmp_path, monkeypatch, capsys):
    (tmp_path / "task_of_user.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(convergence, "load_corpus", CORPUS)
    command = ["--protocol", "task_of_user:task", "--state", str(tmp_path), "--steps", "10", "--recipes", "rowwise"]
    command += ["--device", "cpu", "--width", "1e-6", "--max-seeds", "6"]
    monkeypatch.setattr(sys, "argv", ["convergence", *command])
    assert convergence.main() == 0
    printed = capsys.readouterr().out
    assert "That is more than --max-seeds 6." in printed
    assert re.search(r"\| rowwise \| 6 \|", printed)
    assert len(finished(tmp_path / "results", "protocol")) == 6 * 4
    monkeypatch.setattr(convergence, "finish", lambda *_: pytest.fail("a finished run was made again"))
    assert convergence.main() == 0


def test_checkpoints_in_the_repository_raise(train, capsys):
    with pytest.raises(SystemExit, match="2"):
        train(ROOT / "somewhere")
    assert "outside of the repository" in capsys.readouterr().err


# ---------------------------------------------------------------- tables


RECIPES_OF_SEEDS = [{"bf16": 2.0, "rowwise": 2.02, "blockwise": 2.0}, {"bf16": 3.0, "rowwise": 3.03}]
RECIPES_OF_SEEDS += [{"bf16": 1.0, "rowwise": 1.01}, {}, {"mxfp8": 9.0}]
SMALL = {"question": "breaks", "dim": 128, "layers": 2, "rows": 4, "steps": 400, "outlier": 16}
MODEL = {"question": "architectures", "model": "Mamba2", "rows": 4, "steps": 200}
SAID = {
    "runs and what made them are counted": "9 of 55 runs are finished. Made by commit c0ffee, PyTorch 2.13.0 on H100;",
    "missing runs are counted, and seeds that are not whole are not compared": "1 of 384 runs are finished. 383 are "
    "missing: 0 of 32 seeds are whole",
    "recipes are compared with bf16 of their own seed": "| rowwise | 3 | 2.0200 | +1.00 % ± 0.00 % | +1.00 % |",
    "a recipe with one seed has the residual of all": "| blockwise | 1 | 2.0000 | +0.00 % ± 0.00 % | +0.00 % | within",
    "what suffers is marked by its interval or because it diverged": "| outlier 2^16 | 2.0000 | **+4.97 % ± "
    "1.21 %** | not run | **+4.93 % ± 1.60 %** | not run | **diverged** | not run |",
    "one seed has no interval": "| tensorwise | 1 | 2.2000 | +9.53 % | - | one seed: nothing |",
    "layers left in bf16 have the same control": "| tensorwise, in_proj in bf16 | 1 | 2.0200 | +1.00 % | - |",
    "a recipe has a sentence with its bound": "- **rowwise** costs at most 1.00 % (2.5 M parameters, 4,000 steps,",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of made-up runs, and its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def write(losses, seed=0, device="cpu", **fields):
        for recipe, loss in losses.items():
            spec = Spec(recipe=recipe, seed=seed, **fields)
            run = {"spec": asdict(spec), "held_out": [loss], "diverged_at": None if loss else 7, "commits": ["c0ffee"]}
            run |= {"torch": "2.13.0", "device": device}
            _plan.record(folder, run)

    for seed, losses in enumerate(RECIPES_OF_SEEDS):
        write(losses, seed, question="recipes")
    write({"tensorwise": 2.0}, device="H100", question="recipes")
    write({"bf16": 2.0, "tensorwise": 2.1, "rowwise": 2.1, "blockwise": None}, **SMALL)
    write({"bf16": 2.0, "tensorwise": 2.104}, 1, **SMALL)
    write({"bf16": 2.0, "tensorwise": 2.2}, **MODEL)
    write({"tensorwise": 2.02}, without="in_proj", **MODEL)
    write({"bf16": 2.0}, question="small", **_plan.TINY, schedule=TO_ZERO)
    return figures.of_runs(folder, folder), folder


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_tables_say(page, said):
    assert said in page[0]


def test_tables_compare_nothing_with_a_control_of_another_device_or_one_that_is_not_finished(page):
    text, folder = page
    recipes = text.partition("### 2.5 M")[2].partition("###")[0]
    assert "| rowwise |" in recipes
    assert "| tensorwise |" not in recipes
    assert "| mxfp8 |" not in recipes
    assert text.index("| rowwise |") < text.index("| blockwise |"), "the worst first"
    assert all((folder / f"{name}.svg").read_text().startswith("<?xml") for name in ("intervals", "breaks"))


@pytest.mark.parametrize(
    ("mean", "error", "said"),
    [
        (0.31, 0.01, "above the bar of 0.25 %"),
        (0.02, 0.01, "within the bar of 0.25 %"),
        (0.1, 0.1, "-0.10 % to +0.30 %; 40 seeds make it ± 0.125 %"),
        (-0.2, 0.1, "-0.40 % to -0.00 %; 40 seeds make it ± 0.125 %"),
    ],
)
def test_only_what_the_interval_carries_is_said(mean, error, said):
    assert _runs.verdict(_runs.Row(Estimate(mean, error, 10**6), 5, 1.0, 1, 40)) == said


@pytest.mark.parametrize(
    ("recipes", "seeds", "controls", "residual", "of_seeds"),
    # 2.5 M parameters; small models; the plan of three controls
    [(11, 5, 1, 0.416, 0.48), (7, 3, 1, 0.080, 0.41), (9, 32, 3, 0.080, 0.41)],
)
def test_intervals_cover_a_known_difference(recipes, seeds, controls, residual, of_seeds):
    """In 95 % of 2,000 repetitions one interval does, and in as many or slightly more all of a comparison at once."""
    generator, names = np.random.default_rng(7), [f"recipe {number}" for number in range(1, recipes)]
    effects = generator.normal(0, 0.3, recipes - 1)
    covered, together = [], 0
    for _ in range(2000):
        level = generator.normal(5, of_seeds, seeds)
        runs = {f"bf16{f', twin {one}' if one else ''}": level for one in range(controls)}
        runs |= {name: level + effect for name, effect in zip(names, effects, strict=True)}
        fit = Fit({
            name: dict(enumerate(np.exp((mean + generator.normal(0, residual, seeds)) / 100)))
            for name, mean in runs.items()
        })  # fmt: skip
        estimates = [fit.above([name]) for name in names]
        off = np.abs([one.mean for one in estimates] - effects)
        covered.append(np.mean(off <= [one.half() for one in estimates]))
        together += all(off <= [one.half(len(names)) for one in estimates])
    assert 0.93 <= np.mean(covered) <= 0.97
    assert 0.93 <= together / 2000 <= 0.985


def test_an_interval_of_two_recipes_is_the_paired_one():
    bf16, other = {0: 2.0, 1: 3.0, 2: 1.5}, {0: 2.02, 1: 3.0, 2: 1.53}
    differences = [100 * np.log(other[seed] / bf16[seed]) for seed in bf16]
    estimate = Fit({"bf16": bf16, "rowwise": other}).above(["rowwise"])
    assert estimate.mean == pytest.approx(np.mean(differences))
    assert estimate.half() == pytest.approx(4.303 * np.std(differences, ddof=1) / 3**0.5, rel=1e-3)


def test_seeds_for_a_width_are_the_fewest():
    found = seeds_for(0.1, 0.416, recipes=5, controls=3, comparisons=4)

    def half(n):
        return quantile(4 * (n - 1), 4) * 0.416 * (4 / 3 / n) ** 0.5

    assert half(found) <= 0.1 < half(found - 1)


def test_power_is_a_probability_whatever_the_effect():
    found = [power(effect, Estimate(0.0, 1.0, 150)) for effect in np.arange(0, 12, 0.1)]
    assert found[0] == pytest.approx(0.05)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1)


def test_positive_controls_say_whether_they_are_found_and_with_which_power():
    row = _runs.Row(Estimate(0.17, 0.02, 200), 32, 2.0, 8, 2)
    assert _runs.verdict(row, "tensorwise, head in FP8") == "positive control: found; power for +0.17 %: 100 %"
    row = _runs.Row(Estimate(0.05, 0.085, 200), 2, 2.0, 1, 9)
    assert _runs.verdict(row, "tensorwise, head in FP8") == "positive control: not found; power for +0.17 %: 51 %"


def test_whole_seeds_are_compared_with_controls(tmp_path):
    generator = np.random.default_rng(3)
    for seed in range(3):
        for spec in controlled("small", seed, **_plan.TINY, schedule=TO_ZERO):
            if seed == 2 and spec.recipe == "mxfp8":
                continue
            loss = (2 + seed / 10) * np.exp(generator.normal(0, 1e-4) - 0.037 * (spec.rate == 2))
            run = {"spec": asdict(spec), "held_out": [loss], "training": loss, "diverged_at": None, "commits": []}
            _plan.record(tmp_path, run | {"torch": "2", "device": "cpu"})
    assert _runs.whole_seeds(tmp_path, "small") == {0, 1}
    ((_, recipes, training),) = _runs.comparisons(tmp_path)
    rows = _runs.compare(recipes)
    assert {*RECIPES[1:], "bf16 against itself", *_runs.POSITIVE} <= set(rows)
    assert rows["bf16, rate x 2"].estimate.mean == pytest.approx(-3.7, abs=0.1)
    assert rows["rowwise"].estimate.freedom == 8, "another rate has a residual of its own"
    assert "2 of 32 seeds are whole" in _runs.made_of(tmp_path, "small")
    assert "positive control: found" in _runs.compared(recipes, training)


def test_the_committed_tables_are_those_of_the_committed_runs(tmp_path):
    for path in figures.RESULTS.glob("convergence/*.jsonl"):
        runs = [Spec(**run["spec"]) for run in finished(path.parent, path.stem)]
        assert len(set(runs)) == len(runs), "a run is made once"
    assert len({spec.name for spec in queue()}) == len(set(queue())), "every run has files of its own"
    tables = {"convergence": lambda: figures.of_runs(figures.RESULTS / "convergence", tmp_path), **figures.TABLES}
    for name, made in tables.items():
        assert (figures.RESULTS / f"{name}.md").read_text() == made(), f"python -m benchmarks.figures {name}"
