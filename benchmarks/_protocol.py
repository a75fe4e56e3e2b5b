"""How much FP8 costs a model of the user: a pilot, the number of seeds that the question needs, their runs, a table.

`MODULE:FUNCTION` names a function of the seed that returns three things:

- the model: a `torch.nn.Module` that maps int64 tokens [rows, length] to logits [rows, length, vocabulary];
- `batch(step)`: an integer NumPy array of tokens [rows, length + 1], the same for equal seeds and steps;
- held-out batches: a list of such arrays, the same for all seeds.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

from benchmarks._intervals import Fit
from benchmarks._plan import E5M2_WEIGHTS, RATE, RECIPES, TO_ZERO, TWINS, Spec, finished
from benchmarks._runs import compared, condition, losses

PILOT = 6


def specs(options: argparse.Namespace, seeds: int) -> Iterator[Spec]:
    """Yield the runs: controls and recipes of a seed before the next seed."""
    rate = options.learning_rate / RATE
    for seed in range(seeds):
        runs = [("bf16", twin) for twin in range(TWINS)] + [(recipe, 0) for recipe in options.recipes.split(",")]
        for recipe, twin in runs:
            yield Spec(question="protocol", recipe=recipe, seed=seed, model=options.protocol, steps=options.steps,
                       rate=rate, schedule=TO_ZERO, twin=twin)  # fmt: skip


def problem(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options, or None."""
    known = (*RECIPES[1:], E5M2_WEIGHTS)
    if unknown := set(options.recipes.split(",")) - set(known):
        return f"--recipes: {', '.join(sorted(unknown))} is unknown, choose from {', '.join(known)}"
    module, _, function = options.protocol.partition(":")
    if not module or not function:
        return f"--protocol must be MODULE:FUNCTION, got {options.protocol!r}"
    if options.steps < 10 or options.width <= 0 or options.learning_rate <= 0 or options.max_seeds < PILOT:
        return f"--steps must be 10 or more, --max-seeds {PILOT} or more, --width and --learning-rate positive"
    return None


def measure(options: argparse.Namespace, make: Callable[[list[Spec], argparse.Namespace], int]) -> int:
    """Run the pilot, print how many seeds the interval needs, run them, and print the interval.

    Args:
        options: Of the command line.
        make: Makes the missing ones of some runs; returns 1 if some failed or are left.
    """
    runs = list(specs(options, PILOT))
    if code := make(runs, options):
        return code
    of = condition(asdict(runs[0]))
    fit, recipes = Fit(losses(options.results, "protocol")[of]), len(options.recipes.split(","))
    if not fit.freedom or not fit.residual:
        print("The pilot has no residual: fewer than two seeds ended well, or all runs are equal.")
        return 1
    needed = fit.seeds_for(options.width, recipes)
    done = [run for run in finished(options.results, "protocol") if condition(run["spec"]) == of]
    seconds = sum(run["cpu_seconds"] for run in done) / fit.seeds * max(0, needed - fit.seeds)
    print(f"{fit.seeds} seeds: the residual of a run is {fit.residual:.3f} %.")
    print(f"Intervals of ± {options.width:g} % for {recipes} recipes at once need {needed} seeds: ", end="")
    print(f"about {seconds:.0f} CPU-seconds more.", flush=True)
    if needed > options.max_seeds:
        print(f"That is more than --max-seeds {options.max_seeds}. With {fit.seeds} seeds:")
    elif code := make(list(specs(options, needed)), options):
        return code
    held_out, training = (losses(options.results, "protocol", measure)[of] for measure in ("held_out", "training"))
    print(compared(held_out, training))
    return 0
