"""The report's numbers, table and verdict, from the measurements of both runs."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from demos.common.progress import byte_count
from demos.common.report import Summary
from demos.torch_fsdp.checkpointing import Record
from demos.torch_fsdp.launch import TrainingFailedError
from fp8_common import RECIPES

MOST_BYTES = 0.51
"""Half the bytes, and room for scales."""
ENOUGH_STEPS = 50
"""Before that many steps losses fall whatever the numbers are rounded to: nothing is said about them."""
COUNTED = {
    "all_gather_bytes_per_step": "gathered_bytes",
    "fp8_weight_bytes_per_step": "linear_bytes",
    "gradient_bytes_per_step": "gradient_bytes",
    "amax_all_reduces_per_step": "amax_all_reduces",
    "casts_per_weight_per_step": "casts",
}

Run = dict[str, Any]


def run_figures(records: Sequence[Record], *, ranks: int, tokens_per_step: int) -> Run:
    """Return one run of the report.

    Losses are means over the seeds; with several seeds each one's own are added. Bytes are what one rank received from
    the others in a step. Counts are means over the counted steps, those of the first step of a process apart.

    Args:
        records: of each seed.
        ranks: processes that shared the model.
        tokens_per_step: bytes of text in a step, all ranks together.

    Raises:
        TrainingFailedError: several ranks, and no all-gather was seen.
    """
    counts = [count for record in records for count in record.counts]
    steady = [count for count in counts if not count["first"]] or counts
    if ranks > 1 and not min(count["linear_bytes"] for count in steady):
        raise TrainingFailedError(
            "A step without any all-gather of a linear weight was counted, so the counts cannot be right; no report."
        )
    run: Run = {
        "losses": [fmean(losses) for losses in zip(*(record.losses for record in records), strict=True)],
        "val_loss": fmean(record.val_loss for record in records),
        "state_sha256": records[0].digest,
        "tokens_per_s": round(tokens_per_step / median(timed_seconds(records)), 1),
    }
    run |= {key: whole(fmean(count[name] for count in steady)) for key, name in COUNTED.items()}
    run["counted_steps"] = len(steady)
    run["first_step"] = {key: counts[0][name] for key, name in COUNTED.items()}
    if len(records) > 1:
        run["seeds"] = [
            {"seed": seed, "losses": record.losses, "val_loss": record.val_loss} for seed, record in enumerate(records)
        ]
    return run


def timed_seconds(records: Sequence[Record]) -> list[float]:
    """Return the durations of the steps that were not slowed down by counting; of all, if all were."""
    timed = []
    for record in records:
        counted = {count["step"] for count in record.counts}
        timed += [seconds for step, seconds in enumerate(record.seconds) if step not in counted]
    return timed or [seconds for record in records for seconds in record.seconds]


def whole(value: float) -> int | float:
    """Return an integer where the value is one, as counts should be."""
    return int(value) if value == int(value) else value


def summarize(runs: Mapping[str, Run], *, ranks: int, device: str, recipe: str) -> Summary:
    """Return the table and the verdict in words."""
    bf16, fp8 = runs["bf16"], runs["fp8"]
    bytes_ratio = ratio(fp8["fp8_weight_bytes_per_step"], bf16["fp8_weight_bytes_per_step"])
    difference = fp8["val_loss"] / bf16["val_loss"] - 1
    rows = [
        _row(
            "held-out loss (nats per byte)",
            bf16,
            fp8,
            lambda run: f"{run['val_loss']:.4f}",
            f"{difference:+.2%}",
        ),
        _bytes_row("linear weights, received per step", "fp8_weight_bytes_per_step", bf16, fp8),
        _bytes_row("all parameters, received per step", "all_gather_bytes_per_step", bf16, fp8),
        _bytes_row("gradients, received per step", "gradient_bytes_per_step", bf16, fp8),
        _row("amax all-reduces per step", bf16, fp8, lambda run: f"{run['amax_all_reduces_per_step']:g}", ""),
        _row("casts per weight and step", bf16, fp8, lambda run: f"{run['casts_per_weight_per_step']:g}", ""),
        _row(_speed_title(device), bf16, fp8, lambda run: f"{run['tokens_per_s']:,.0f}", ""),
    ]
    verdict = [
        _short_answer(bf16, fp8, bytes_ratio),
        _about_bytes(bf16, fp8, bytes_ratio, ranks),
        _about_loss(bf16, fp8, difference),
        _about_work(fp8),
        _about_time(bf16, fp8, device),
        _about_recipes(recipe),
    ]
    columns = ["", "bf16", f"FP8 ({recipe})", "FP8 / bf16"]
    return Summary(title="PyTorch FSDP2: bf16 and FP8 all-gather", columns=columns, rows=rows, verdict=verdict)


def ratio(part: float, whole: float) -> float | None:
    """Return a quotient, or None where nothing travelled."""
    return part / whole if whole else None


def spread(run: Run) -> float | None:
    """Return how far apart a run's seeds end: largest minus smallest held-out loss; None for one seed."""
    ends = [seed["val_loss"] for seed in run.get("seeds", ())]
    return max(ends) - min(ends) if ends else None


def _row(name: str, bf16: Run, fp8: Run, show: Any, last: str) -> list[str]:
    return [name, show(bf16), show(fp8), last]


def _bytes_row(name: str, key: str, bf16: Run, fp8: Run) -> list[str]:
    quotient = ratio(fp8[key], bf16[key])
    last = "" if quotient is None else f"{quotient:.3f}x"
    return _row(name, bf16, fp8, lambda run: byte_count(run[key]), last)


def ends(run: Run) -> list[float]:
    """Return the held-out loss of each seed."""
    return [seed["val_loss"] for seed in run.get("seeds", [run])]


def differences(bf16: Run, fp8: Run) -> list[float]:
    """Return the relative difference of the held-out loss from bf16's, seed by seed."""
    return [b / a - 1 for a, b in zip(ends(bf16), ends(fp8), strict=True)]


def _short_answer(bf16: Run, fp8: Run, bytes_ratio: float | None) -> str:
    loss = _short_loss(bf16, fp8)
    if bytes_ratio is None:
        return f"One process, so nothing travelled; {loss}."
    moved = "Half the bytes" if bytes_ratio <= MOST_BYTES else f"{bytes_ratio:.2f}x the bytes"
    return f"{moved} on the wire for the linear weights, {loss}."


def _short_loss(bf16: Run, fp8: Run) -> str:
    steps, apart = len(fp8["losses"]), max(differences(bf16, fp8), key=abs)
    if steps < ENOUGH_STEPS:
        return f"{steps} steps say nothing about the loss"
    if (own := spread(bf16)) is None:
        return f"a held-out loss that differs by {apart:+.2%} (one seed: bf16's own spread is not known)"
    within = abs(apart) * fp8["val_loss"] <= own
    return f"a held-out loss within {abs(apart):.2%} of bf16's, {'less' if within else 'more'} than its seeds differ"


def _about_bytes(bf16: Run, fp8: Run, bytes_ratio: float | None, ranks: int) -> str:
    if bytes_ratio is None:
        return "With one process no weight is gathered; with --ranks 2 the bytes can be compared."
    key = "fp8_weight_bytes_per_step"
    return (
        f"For the weights of the linear layers each of the {ranks} processes received {byte_count(fp8[key])} per step "
        f"in FP8, scales included, and {byte_count(bf16[key])} in bf16: {bytes_ratio:.3f}x, counted at the collectives."
    )


def _about_loss(bf16: Run, fp8: Run, difference: float) -> str:
    means = f"The held-out loss is {fp8['val_loss']:.4f} with FP8 and {bf16['val_loss']:.4f} with bf16"
    apart = spread(bf16)
    if apart is None:
        return f"{means} ({difference:+.2%}); --seeds 3 shows how much bf16 itself varies from seed to seed."
    each = ", ".join(f"{one:+.2%}" for one in differences(bf16, fp8))
    return (
        f"{means} ({difference:+.2%}, means over {len(bf16['seeds'])} seeds; seed by seed {each}); bf16 itself spreads "
        f"over {apart:.4f} ({apart / bf16['val_loss']:.2%}) between seeds."
    )


def _about_work(fp8: Run) -> str:
    reductions, casts = fp8["amax_all_reduces_per_step"], fp8["casts_per_weight_per_step"]
    first = fp8["first_step"]
    return (
        f"In a step, FP8 needs {reductions:g} all-reduce{'s' * (reductions != 1)} of amax values for all weights "
        f"together and casts each weight {_times(casts)} (the first step, counted apart: "
        f"{first['amax_all_reduces_per_step']:g} and {first['casts_per_weight_per_step']:g})."
    )


def _about_time(bf16: Run, fp8: Run, device: str) -> str:
    longer = bf16["tokens_per_s"] / fp8["tokens_per_s"]
    if device != "cpu":
        return f"An FP8 step took {longer:.2f} times as long as bf16's; a model this small does not fill a GPU."
    if longer < 1:  # a CPU without bf16 arithmetic emulates both
        return "This CPU emulates FP8 and bf16 products alike: their times say nothing about either."
    return f"The cost here: an FP8 step took {longer:.2f} times as long, because a CPU emulates FP8 products."


def _speed_title(device: str) -> str:
    return "tokens per second" + (", FP8 products emulated" if device == "cpu" else "")


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _about_recipes(recipe: str) -> str:
    others = [name for name in RECIPES if name not in (recipe, "mx")]  # there are no MX products here
    return f"The recipe was {recipe}; --recipe trains with another one: {', '.join(others)}."
