"""The table and the verdict say what was measured, also when it is not what was hoped for."""

import pytest

from demos.torch_fsdp.checkpointing import Record
from demos.torch_fsdp.launch import TrainingFailedError
from demos.torch_fsdp.results import run_figures, spread, summarize
from fp8_torch_fsdp import Float8LinearConfig


def record(val_loss=2.0, linear=1000, amax=1, steps=5):
    """Steps 0 and 1 are counted, step 0 is the first; the others take half as long."""
    counts = [
        {
            "step": step,
            "linear_bytes": linear,
            "gathered_bytes": linear + 50,
            "gradient_bytes": 4 * linear,
            "amax_all_reduces": amax + 7 * (step == 0),
            "casts": 1.0,
            "first": step == 0,
        }
        for step in range(2)
    ]
    seconds = [1.0, 1.0] + [0.5] * (steps - 2)
    return Record(
        losses=[val_loss + 5.0 / (1 + i) for i in range(steps)], seconds=seconds, counts=counts, val_loss=val_loss
    )


def figures(*records, ranks=2):
    return run_figures(records, ranks=ranks, tokens_per_step=100)


def words(bf16, fp8, ranks=2, device="cpu", recipe="tensorwise"):
    return summarize({"bf16": bf16, "fp8": fp8}, ranks=ranks, device=device, recipe=recipe)


def test_the_first_step_is_apart_and_counted_steps_are_not_timed():
    run = figures(record())
    assert run["fp8_weight_bytes_per_step"] == 1000
    assert run["all_gather_bytes_per_step"] == 1050
    assert run["gradient_bytes_per_step"] == 4000
    assert run["amax_all_reduces_per_step"] == 1
    assert run["first_step"]["amax_all_reduces_per_step"] == 8
    assert run["casts_per_weight_per_step"] == 1
    assert run["tokens_per_s"] == 200
    assert run["losses"] == record().losses
    assert "seeds" not in run


def test_a_run_of_counted_steps_alone_is_still_timed():
    assert figures(record(steps=2))["tokens_per_s"] == 100


def test_seeds_are_averaged_and_kept():
    run = figures(record(2.0), record(2.5), record(2.1))
    assert run["val_loss"] == pytest.approx(2.2)
    assert run["losses"][0] == pytest.approx(7.2)
    assert [seed["val_loss"] for seed in run["seeds"]] == [2.0, 2.5, 2.1]
    assert spread(run) == 0.5
    assert spread(figures(record())) is None


def test_a_count_that_varies_is_not_rounded_to_what_was_hoped_for():
    odd = record()
    odd.counts.append({**odd.counts[1], "step": 2, "amax_all_reduces": 2})
    assert figures(odd)["amax_all_reduces_per_step"] == 1.5


def test_no_gather_seen_is_an_error_unless_there_is_one_process():
    with pytest.raises(TrainingFailedError, match="without any all-gather"):
        figures(record(linear=0))
    assert figures(record(linear=0), ranks=1)["fp8_weight_bytes_per_step"] == 0


@pytest.mark.parametrize(
    ("linear", "answer"), [(505, "Half the bytes on the wire"), (520, "0.52x the bytes on the wire")]
)
def test_the_short_answer_begins_with_the_bytes(linear, answer):
    assert words(figures(record(amax=0)), figures(record(2.0, linear))).verdict[0].startswith(answer)


@pytest.mark.parametrize(
    ("bf16", "fp8", "steps", "answer"),
    [
        ([2.0], [2.0], 2, "2 steps say nothing about the loss."),
        ([2.0, 2.2], [2.0, 2.2], 49, "49 steps say nothing about the loss."),
        ([2.0], [2.05], 50, "differs by +2.50% (one seed: bf16's own spread is not known)."),
        ([2.0, 2.2], [2.01, 2.2], 50, "within 0.50% of bf16's, less than its seeds differ."),
        ([2.0, 2.01], [2.0, 2.11], 50, "within 4.98% of bf16's, more than its seeds differ."),
    ],
)
def test_the_short_answer_about_the_loss_knows_seeds_and_steps(bf16, fp8, steps, answer):
    runs = (figures(*(record(loss, steps=steps) for loss in losses)) for losses in (bf16, fp8))
    assert words(*runs).verdict[0].endswith(answer)


@pytest.mark.parametrize(
    ("speed", "device", "sentence"),
    [
        (100, "cpu", "took 2.00 times as long, because a CPU emulates FP8 products."),
        (352, "cpu", "This CPU emulates FP8 and bf16 products alike"),
        (100, "NVIDIA", "took 2.00 times as long as bf16's; a model"),
    ],
)
def test_times_of_emulations_are_a_cost_and_never_a_gain(speed, device, sentence):
    made = words(figures(record()), {**figures(record()), "tokens_per_s": speed}, device=device)
    assert sentence in " ".join(made.verdict)
    assert made.rows[-1][-1] == "", "no ratio stands beside emulated products"
    assert ("emulated" in made.rows[-1][0]) == (device == "cpu")


def test_the_verdict_names_bytes_loss_spread_all_reduces_and_time():
    bf16 = figures(record(2.0, 2000, 0), record(2.2, 2000, 0))
    text = " ".join(words(bf16, figures(record(2.1), record(2.11))).verdict)
    for part in (
        "1.00 kB",
        "2.00 kB",
        "0.500x",
        "+0.24%",
        "spreads over 0.2000",
        "1 all-reduce",
        "once",
        "seed by seed +5.00%, -4.09%",
        "1.00 times",
    ):
        assert part in text


def test_one_seed_says_how_to_see_the_spread():
    assert "--seeds 3" in " ".join(words(figures(record()), figures(record())).verdict)


def test_one_process_makes_no_claim_about_bytes():
    run = figures(record(linear=0), ranks=1)
    verdict = words(run, run, ranks=1).verdict
    assert verdict[0] == "One process, so nothing travelled; 5 steps say nothing about the loss."
    assert "--ranks 2" in verdict[1]


def test_the_report_lists_the_recipes_and_each_can_be_asked_for():
    listed = words(figures(record()), figures(record()), recipe="rowwise").verdict[-1]
    assert listed.startswith("The recipe was rowwise; ")
    names = listed.rpartition(": ")[2].rstrip(".").split(", ")
    assert names == ["tensorwise", "tensorwise_delayed", "rowwise_with_gw_hp", "blockwise"]
    for name in names:
        Float8LinearConfig.from_recipe_name(name)
