"""What runs of `benchmarks.convergence` say: differences between recipes, their intervals, and tables of them.

A run is compared with bf16 of the same seed under the same conditions. With two seeds and more, a difference has the
95 % interval of its mean (Student's t of the differences, paired by seed); with one seed it has none, and then nothing
is said of it.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks._common import table
from benchmarks.convergence import RECIPES, WIRES, Spec, queue

BAR, BROKEN = 0.25, 1.0
"""Percent of the held-out loss: the bar that DeepSeek-V3 set itself, and from where on training suffers."""
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""97.5 % quantiles, by the number of seeds."""
Condition = tuple[tuple[str, Any], ...]
Cells = dict[Condition, dict[str, dict[int, float]]]
"""Final held-out loss by condition, recipe and seed; infinite where a run diverged."""


def losses(folder: Path, question: str) -> Cells:
    """Return the final held-out losses of the finished runs of a question."""
    found: Cells = defaultdict(lambda: defaultdict(dict))
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{question}-*.json"))]
    places = {(condition(run["spec"]), run["spec"]["seed"]): run["device"] for run in runs if is_control(run["spec"])}
    for run in runs:
        spec = run["spec"]
        # what another device computed than the control is not compared
        if places.get((condition(spec), spec["seed"]), run["device"]) == run["device"]:
            loss = float("inf") if run["diverged_at"] else run["held_out"][-1]
            found[condition(spec)][spec["recipe"]][spec["seed"]] = loss
    return found


def is_control(spec: dict[str, Any]) -> bool:
    """Whether others are compared with this run."""
    return spec["recipe"] == "bf16"


def condition(spec: dict[str, Any]) -> Condition:
    """Return what runs have in common that are compared with one another."""
    return tuple((name, value) for name, value in spec.items() if name not in ("recipe", "seed"))


def paired(recipes: dict[str, dict[int, float]], recipe: str, control: str = "bf16") -> list[int]:
    """Return the seeds of a recipe whose control has ended well."""
    others = recipes.get(control, {})
    return sorted(seed for seed in recipes.get(recipe, {}) if others.get(seed, float("inf")) < float("inf"))


def differences(recipes: dict[str, dict[int, float]], recipe: str, control: str = "bf16") -> list[float]:
    """Return how far a recipe ends above its control in percent, a value for each of the seeds that both have."""
    found, others = recipes.get(recipe, {}), recipes.get(control, {})
    return [100 * (found[seed] / others[seed] - 1) for seed in paired(recipes, recipe, control)]


def interval(values: list[float]) -> float | None:
    """Return half of the 95 % interval of the mean of differences; None with one seed."""
    return STUDENT_T[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def verdict(values: list[float]) -> str:
    """Return what the interval carries, and nothing else."""
    half = interval(values)
    if half is None:
        return "one seed: nothing"
    low, high = fmean(values) - half, fmean(values) + half
    if low > BAR:
        return f"above the bar of {BAR} %"
    return f"within the bar of {BAR} %" if low >= -BAR and high <= BAR else f"does not tell: the bar is {BAR} %"


def percent(values: list[float]) -> str:
    """Return the mean of differences and its interval as text."""
    if not values:
        return "not run"
    if max(values) == float("inf"):
        return "diverged"
    half = interval(values)
    return f"{fmean(values):+.2f} %" + (f" ± {half:.2f} %" if half is not None else "")


def compared(recipes: dict[str, dict[int, float]]) -> str:
    """Return the table of the recipes of one condition, the largest differences first."""
    found = {recipe: differences(recipes, recipe) for recipe in (*RECIPES[1:], *WIRES)}
    order = sorted((recipe for recipe, values in found.items() if values), key=lambda one: -fmean(found[one]))
    rows = [["recipe", "seeds", "held-out loss", "above bf16, 95 % interval", "each seed", "what the interval says"]]
    for recipe in order:
        values = found[recipe]
        each = ", ".join(f"{value:+.2f} %" for value in values)
        loss = f"{fmean(recipes[recipe][seed] for seed in paired(recipes, recipe)):.4f}"
        rows.append([recipe, str(len(values)), loss, percent(values), each, verdict(values)])
    control = recipes.get("bf16", {})
    if control:
        rows.append(["bf16", str(len(control)), f"{fmean(control.values()):.4f}", "the control", "-", "-"])
    return table(rows)


def on_wires(recipes: dict[str, dict[int, float]]) -> str:
    """Return the table of layers whose gathers and gradients are codes, beside the same layers without."""
    rows = [["layers, what travels as codes", "seeds", "above the same layers, 95 % interval", "each seed"]]
    for wire in WIRES:
        if values := differences(recipes, wire, wire.partition(", ")[0]):
            each = ", ".join(f"{value:+.2f} %" for value in values)
            rows.append([wire, str(len(values)), percent(values), each])
    return table(rows)


def strength(one: Condition) -> str:
    """Return what a condition of the break runs changes, in words."""
    spec = dict(one)
    usual = next(dict(condition_of(run)) for run in queue() if run.question == "breaks")
    words: dict[str, Callable[[Any], str]] = {
        "rate": lambda value: f"rate x {value:g}",
        "outlier": lambda value: f"outlier 2^{value}",
        "head": lambda _: "head in FP8",
        "layers": lambda value: f"{value} blocks",
    }
    changed = [words[name](spec[name]) for name in words if spec[name] != usual[name]]
    return ", ".join(changed) or "unchanged"


def condition_of(spec: Spec) -> Condition:
    """Return the condition of a run of the queue."""
    return condition({name: getattr(spec, name) for name in spec.__slots__})


def break_rows(cells: Cells) -> dict[str, dict[str, list[float]]]:
    """Return differences by perturbation and recipe, kinds of perturbation together and each kind by strength."""
    wanted = {condition_of(spec): spec for spec in queue() if spec.question == "breaks"}
    order = sorted(
        wanted, key=lambda one: (wanted[one].layers, wanted[one].head, wanted[one].outlier, wanted[one].rate)
    )
    return {strength(one): {r: differences(cells.get(one, {}), r) for r in RECIPES[1:]} for one in order}


def is_broken(values: list[float]) -> bool:
    """Whether the differences of a perturbation say that training suffers from the recipe under it.

    That a run diverged says so; of a loss that ends higher the interval has to say it.
    """
    half = interval(values) if float("inf") not in values else None
    return float("inf") in values or (half is not None and fmean(values) - half > BROKEN)


def breaks(cells: Cells) -> str:
    """Return the table of perturbations against recipes; where training suffers, the cell is bold."""
    rows = [["perturbation", "bf16", *RECIPES[1:]]]
    by_words = {strength(one): recipes for one, recipes in cells.items()}
    for words, recipes in break_rows(cells).items():
        control = by_words.get(words, {}).get("bf16", {})
        texts = [f"**{percent(v)}**" if is_broken(v) else percent(v) for v in recipes.values()]
        if control:
            mean = fmean(control.values())
            rows.append([words, f"{mean:.4f}" if mean < float("inf") else "diverged", *texts])
    return table(rows)


def by_architecture(cells: Cells) -> str:
    """Return the table of architectures against recipes, and of architectures with some layers left in bf16."""
    rows = [["architecture", "seeds", "bf16", *RECIPES[1:]]]
    for one, recipes in cells.items():
        spec = dict(one)
        control = cells.get(condition(spec | {"without": ""}), {}).get("bf16", {})
        if control:
            left = f", {spec['without']} in bf16" if spec["without"] else ""
            found = [percent(differences({**recipes, "bf16": control}, recipe)) for recipe in RECIPES[1:]]
            rows.append([spec["model"] + left, str(len(control)), f"{fmean(control.values()):.4f}", *found])
    return table(rows)


def finished(folder: Path, question: str) -> str:
    """Return how many of the runs of a question are finished, and which commits of the packages made them."""
    wanted = {spec.name for spec in queue() if spec.question == question}
    runs = [json.loads(path.read_text()) for path in folder.glob(f"{question}-*.json") if path.stem in wanted]
    commits = sorted({commit for run in runs for commit in run["commits"]})
    places = sorted({f"PyTorch {run['torch']} on {run['device']}" for run in runs})
    made = f" Made by commit {', '.join(commits)}, {'; '.join(places)}." if runs else ""
    return f"{len(runs)} of {len(wanted)} runs are finished.{made}"
