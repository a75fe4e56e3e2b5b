"""What runs of `benchmarks.convergence` show: differences between recipes, their intervals, and tables of them.

Runs are compared under the same conditions, with one residual for all recipes (`benchmarks._intervals`). Of questions
with three controls only whole seeds are compared.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import _plan
from benchmarks._common import table
from benchmarks._intervals import CONTROL, TWIN, Estimate, Fit, power
from benchmarks._plan import E5M2_WEIGHTS, RECIPES, SEEDS, WIRES, Spec, queue

BAR, BROKEN = 0.25, 1.0
"""Percent of the held-out loss: the bar that DeepSeek-V3 set itself, and from where on training suffers."""
HEAD, RATE, ITSELF = ", head in FP8", ", rate x 2", "bf16 against itself"
POSITIVE = {f"tensorwise{HEAD}": 0.17, E5M2_WEIGHTS: None, f"{CONTROL}{RATE}": -3.7}
"""Controls that a comparison has to find, with the size that three seeds of the same model showed, percent."""
Condition = tuple[tuple[str, Any], ...]
Cells = dict[Condition, dict[str, dict[int, float]]]
"""Final loss by condition, recipe and seed; infinite where a run diverged."""


def losses(folder: Path, question: str, measure: str = "held_out") -> Cells:
    """Return the final held-out losses, or the training losses, of the finished runs of a question."""
    found: Cells = defaultdict(lambda: defaultdict(dict))
    runs = _plan.finished(folder, question)
    if question in SEEDS:
        runs = [run for run in runs if run["spec"]["seed"] in whole_seeds(folder, question)]
    places = {(condition(run["spec"]), run["spec"]["seed"]): run["device"] for run in runs if is_control(run["spec"])}
    for run in runs:
        spec = run["spec"]
        # what another device computed than the control is not compared
        if places.get((condition(spec), spec["seed"]), run["device"]) == run["device"]:
            value = run[measure] if measure == "training" else run["held_out"][-1]
            found[condition(spec)][label(spec)][spec["seed"]] = float("inf") if run["diverged_at"] else value
    return found


def whole_seeds(folder: Path, question: str) -> set[int]:
    """Return the seeds of which all runs of the queue are finished, on one device."""
    wanted = {Spec(**run["spec"]): run["device"] for run in _plan.finished(folder, question)}
    plan: dict[int, list[Spec]] = defaultdict(list)
    for spec in queue():
        if spec.question == question:
            plan[spec.seed].append(spec)
    devices = {seed: {wanted.get(spec) for spec in specs} for seed, specs in plan.items()}
    return {seed for seed, places in devices.items() if len(places) == 1 and None not in places}


def is_control(spec: dict[str, Any]) -> bool:
    """Whether others are compared with this run."""
    return label(spec) == CONTROL


def condition(spec: dict[str, Any]) -> Condition:
    """Return what runs have in common that are compared with one another."""
    varied = {"recipe", "seed", "without", "twin"} | ({"head", "rate"} if spec["question"] in SEEDS else set())
    return tuple((name, value) for name, value in spec.items() if name not in varied)


def label(spec: dict[str, Any]) -> str:
    """Return the name of a run among those of its condition."""
    name = spec["recipe"] + (f", {spec['without']} in bf16" if spec["without"] else "")
    if spec["question"] in SEEDS:
        name += (HEAD if spec["head"] else "") + (f", rate x {spec['rate']:g}" if spec["rate"] != 1 else "")
    return name + (f"{TWIN}{spec['twin']}" if spec["twin"] else "")


@dataclass(frozen=True, slots=True)
class Row:
    """A recipe of a comparison.

    Attributes:
        estimate: How far it ends above its control; None if it diverged.
        seeds: Number of its seeds.
        loss: Mean loss.
        comparisons: Number of intervals of the comparison that hold at once.
        needed: Seeds with which half of the interval is half of the bar, or None without a residual.
    """

    estimate: Estimate | None
    seeds: int
    loss: float
    comparisons: int
    needed: int | None

    @property
    def limits(self) -> tuple[float, float] | None:
        """Both ends of the interval that holds for all recipes of the comparison at once."""
        if self.estimate is None or not self.estimate.freedom:
            return None
        half = self.estimate.half(self.comparisons)
        return self.estimate.mean - half, self.estimate.mean + half


def compare(recipes: Mapping[str, dict[int, float]]) -> dict[str, Row]:
    """Return every recipe beside bf16, means of recipes of a kind, and controls, of losses by recipe and seed."""
    pooled = {name: of for name, of in recipes.items() if RATE not in name}
    rows: dict[str, Row] = {}
    if not any(value < float("inf") for value in recipes.get(CONTROL, {}).values()):
        return rows

    def add(name: str, fit: Fit, members: list[str], comparisons: int) -> None:
        of = [value for member in members for value in recipes.get(member, {}).values()]
        needed = fit.seeds_for(BAR / 2, comparisons) if fit.freedom and fit.residual else None
        rows[name] = Row(fit.above(members), fit.seeds, fmean(of or [0.0]), comparisons, needed)

    fit = Fit(pooled)
    others = [name for name in fit.names if name != CONTROL]
    for name in others:
        add(name, fit, [name], len(others))
        seeds = set(recipes[name]) & set(recipes[CONTROL])
        row, of = rows[name], [recipes[name][seed] for seed in seeds]
        rows[name] = Row(row.estimate, len(seeds), fmean(of), len(others), row.needed)
    for name, of in pooled.items():
        if float("inf") in of.values() and name != CONTROL:
            rows[name] = Row(None, len(of), float("inf"), len(others), None)
    for name, kind in {"FP8": RECIPES[1:], "compressed": [wire for wire in WIRES if wire.startswith(CONTROL)]}.items():
        if len(members := [one for one in kind if one in fit.names]) > 1:
            add(f"{name}, mean of {len(members)}", fit, members, 1)
    # another rate, or another bit at the start, has a residual of its own
    for name in (name for name in recipes if RATE in name):
        add(name, Fit({**{n: of for n, of in recipes.items() if n.partition(TWIN)[0] == CONTROL}, name: recipes[name]}),
            [name], 1)  # fmt: skip
    twins = [of for name, of in recipes.items() if name.startswith(CONTROL + TWIN)]
    if twins:
        renamed = {f"{CONTROL}{TWIN if place else ''}{place or ''}": of for place, of in enumerate(twins)}
        add(ITSELF, Fit(renamed | {ITSELF: recipes[CONTROL]}), [ITSELF], 1)
        rows[ITSELF] = Row(rows[ITSELF].estimate, rows[ITSELF].seeds, fmean(recipes[CONTROL].values()), 1, None)
    return rows


def verdict(row: Row, name: str = "") -> str:
    """Return what the interval carries, and what would tell more."""
    if row.limits is None or row.estimate is None:
        return "diverged" if row.estimate is None else "one seed: nothing"
    low, high = row.limits
    if name in POSITIVE:
        size = POSITIVE[name]
        found = "found" if low > 0 or high < 0 else "not found"
        chance = power(row.estimate.mean if size is None else size, row.estimate, row.comparisons)
        of = "its own size" if size is None else f"{size:+g} %"
        return f"positive control: {found}; power for {of}: {100 * chance:.0f} %"
    if name == ITSELF:
        return "negative control: " + ("0 is inside" if low <= 0 <= high else "0 is outside")
    if low > BAR:
        return f"above the bar of {BAR} %"
    if low >= -BAR and high <= BAR:
        return f"within the bar of {BAR} %"
    return f"{low:+.2f} % to {high:+.2f} %; {row.needed:,} seeds make it ± {BAR / 2} %"


def percent(row: Row | None) -> str:
    """Return a difference and its own 95 % interval as text."""
    if row is None:
        return "not run"
    if row.estimate is None:
        return "diverged"
    mean = row.estimate.mean if abs(row.estimate.mean) > 1e-9 else 0.0  # a difference of nothing has no sign
    return f"{mean:+.2f} %" + (f" ± {row.estimate.half():.2f} %" if row.estimate.freedom else "")


def at_most(row: Row) -> str:
    """Return the upper end of the interval that holds for all recipes at once, as text."""
    return "-" if row.limits is None else f"{row.limits[1]:+.2f} %"


def compared(
    recipes: Mapping[str, dict[int, float]],
    training: Mapping[str, dict[int, float]] | None = None,
) -> str:
    """Return the table of the recipes of one comparison, the largest differences first."""
    rows, others = compare(recipes), compare(training or {})
    order = sorted(rows, key=lambda one: (one in POSITIVE or one == ITSELF, -_mean(rows[one])))
    head = ["recipe", "seeds", "held-out loss", "above bf16, 95 % interval", "at most", "what the interval says"]
    lines = [[*head, *(["training loss above bf16"] if training else [])]]
    for name in order:
        row = rows[name]
        cells = [name, str(row.seeds), f"{row.loss:.4f}", percent(row), at_most(row), verdict(row, name)]
        lines.append([*cells, *([percent(others.get(name))] if training else [])])
    if control := recipes.get(CONTROL, {}):
        cells = [CONTROL, str(len(control)), f"{fmean(control.values()):.4f}", "the control", "-", "-"]
        lines.append([*cells, *(["-"] if training else [])])
    return table(lines)


def _mean(row: Row) -> float:
    return row.estimate.mean if row.estimate else float("inf")


def strength(one: Condition) -> str:
    """Return what a condition of the break runs changes, in words."""
    spec = dict(one)
    usual = next(dict(condition(asdict(run))) for run in queue() if run.question == "breaks")
    words: dict[str, Callable[[Any], str]] = {
        "rate": lambda value: f"rate x {value:g}",
        "outlier": lambda value: f"outlier 2^{value}",
        "head": lambda _: "head in FP8",
        "layers": lambda value: f"{value} blocks",
    }
    changed = [words[name](spec[name]) for name in words if spec[name] != usual[name]]
    return ", ".join(changed) or "unchanged"


def break_rows(cells: Cells) -> dict[str, dict[str, Row]]:
    """Return comparisons by perturbation, kinds of perturbation together and each kind by strength."""
    wanted = {condition(asdict(spec)): spec for spec in queue() if spec.question == "breaks"}
    order = sorted(
        wanted, key=lambda one: (wanted[one].layers, wanted[one].head, wanted[one].outlier, wanted[one].rate)
    )
    return {strength(one): compare(cells.get(one, {})) for one in order}


def is_broken(row: Row) -> bool:
    """Whether training suffers from a recipe: it diverged, or its own interval lies above `BROKEN`."""
    estimate = row.estimate
    return estimate is None or (estimate.freedom > 0 and estimate.mean - estimate.half() > BROKEN)


def breaks(cells: Cells) -> str:
    """Return the table of perturbations against recipes; where training suffers, the cell is bold."""
    rows = [["perturbation", "bf16", *RECIPES[1:]]]
    by_words = {strength(one): recipes for one, recipes in cells.items()}
    for words, found in break_rows(cells).items():
        control = by_words.get(words, {}).get(CONTROL, {})
        texts = {name: f"**{percent(row)}**" if is_broken(row) else percent(row) for name, row in found.items()}
        if control:
            mean = fmean(control.values())
            loss = f"{mean:.4f}" if mean < float("inf") else "diverged"
            rows.append([words, loss, *(texts.get(name, "not run") for name in RECIPES[1:])])
    return table(rows)


def made_of(folder: Path, question: str) -> str:
    """Return how many of the runs of a question are finished and missing, and which commits made them."""
    wanted = {spec for spec in queue() if spec.question == question}
    runs = [run for run in _plan.finished(folder, question) if Spec(**run["spec"]) in wanted]
    commits = sorted({commit for run in runs for commit in run["commits"]})
    places = sorted({f"PyTorch {run['torch']} on {run['device']}" for run in runs})
    made = f" Made by commit {', '.join(commits)}, {'; '.join(places)}." if runs else ""
    text = f"{len(runs)} of {len(wanted)} runs are finished."
    if question in SEEDS:
        whole, missing = len(whole_seeds(folder, question)), len(wanted) - len(runs)
        text += f" {missing} are missing: {whole} of {SEEDS[question]} seeds are whole, and only those are compared."
    return text + made


def comparisons(folder: Path) -> Iterator[tuple[str, dict[str, dict[int, float]], dict[str, dict[int, float]]]]:
    """Yield what is compared: title, held-out losses, and training losses if they were kept."""
    titles = {
        "small": "0.4 M parameters, 400 steps, rate to 0, three controls",
        "anneal": "0.4 M parameters, 1,200 steps in bf16, then 400 steps to rate 0 in each recipe",
        "medium": "2.5 M parameters, 4,000 steps, rate to 0, three controls",
        "large": "20 M parameters, 3,000 steps, rate to 0, three controls",
        "mixture": "Mixture of 4 experts, 0.6 M parameters, 150 steps, rate to 0",
        "recipes": "2.5 M parameters, 4,000 steps",
        "larger": "20 M parameters, 3,000 steps",
        "wires": "0.4 M parameters, 500 steps, compressed communication",
    }
    for question, title in titles.items():
        training = losses(folder, question, "training") if question in SEEDS else {}
        for one, recipes in losses(folder, question).items():
            yield title, recipes, training.get(one, {})
    for one, recipes in losses(folder, "breaks").items():
        words = strength(one).replace("unchanged", "")
        if words in ("", "head in FP8", "8 blocks"):
            yield f"0.4 M parameters, 400 steps{words and ', '}{words}", recipes, {}
    for one, recipes in losses(folder, "architectures").items():
        yield f"{dict(one)['model']}, 200 steps", recipes, {}


def bounds(folder: Path) -> str:
    """Return one sentence for each recipe: what it costs at most, in each comparison."""
    found: dict[str, list[str]] = defaultdict(list)
    for title, recipes, _ in comparisons(folder):
        for name, row in compare(recipes).items():
            if row.limits and name in (*RECIPES, *WIRES):
                found[name].append(f"{row.limits[1]:.2f} % ({title}, {row.seeds} seeds)")
    order = [name for name in (*RECIPES, *WIRES) if name in found]
    return "\n".join(f"- **{name}** costs at most {'; '.join(found[name])}." for name in order)
