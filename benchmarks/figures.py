"""The tables and pictures of pages that need no measuring: from committed results, NumPy, and questions to recipes.

    python -m benchmarks.figures [NAME ...] [--results FOLDER] [--pictures FOLDER]

convergence.md, from the runs in results/convergence, and its pictures; convergence-packages.md and
gradient_convergence.md, from runs of an earlier runner; certificates.json and .md, which are what `fp8 certify` answers
of all recipes on this machine, as on any; and the pictures of numerics, README and links. By its name alone, because it
trains models of Transformers and Diffusers (`nox -s ecosystem` installs both): architectures.json and its two tables.
"""

import argparse
import dataclasses
import logging
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from benchmarks import ROOT
from benchmarks._common import RESULTS, save, table
from benchmarks._drawings import (
    DRAWINGS,
    above_control,
    by_package,
    draw_breaks,
    draw_intervals,
    of_results,
    picture,
)
from benchmarks._plan import SEEDS
from benchmarks._runs import bounds, break_rows, breaks, compared, comparisons, losses, made_of
from fp8_common.testing.certify import PROPERTIES, rows
from fp8_common.testing.certify import table as table_of_answers

PICTURES = ROOT / "docs/assets"
QUESTIONS = (*SEEDS, "recipes", "larger", "wires", "breaks", "architectures")


def of_runs(folder: Path, pictures: Path) -> str:
    """Return the tables as Markdown, and draw the pictures that they are shown with."""
    shown = list(comparisons(folder))
    picture("intervals", (7.2, 15), partial(draw_intervals, shown=shown), pictures)
    parts = ["![How far each recipe ends above bf16, with intervals](../assets/convergence/intervals.svg)"]
    parts.append(bounds(folder))
    parts += ["### Runs", "\n".join(f"- **{question}**: {made_of(folder, question)}" for question in QUESTIONS)]
    for title, recipes, training in shown:
        parts += [f"### {title}", compared(recipes, training)]
    cells = losses(folder, "breaks")
    parts.append("### Where recipes break")
    if any(found for found in break_rows(cells).values()):
        picture("breaks", (6.4, 4.4), partial(draw_breaks, rows=break_rows(cells)), pictures)
        parts.append(
            "![Perturbations against recipes: filled where training suffers](../assets/convergence/breaks.svg)"
        )
    parts.append(breaks(cells))
    # a table of nothing but its head and the line below it says nothing
    return "\n\n".join(part for part in parts if not part.startswith("|") or part.count("\n") > 1) + "\n"


def of_packages() -> str:
    """Return the table of one small model by package and recipe, each beside the control of its seed."""
    known, found = of_results("convergence"), by_package()
    sizes = {name.partition("/")[0]: run["parameters"] for name, run in known["runs"].items()}
    told = ", ".join(f"{package} {sizes[package]:,}" for package in found)
    settings = "{steps} steps of {rows} x {length} bytes; width {dim}, {layers} blocks".format(**known["settings"])
    head = ["package", "recipe", "seeds", "held-out loss", "spread of the seeds"]
    lines = [[*head, "above the control: mean, standard error", "per seed"]]
    for package, recipes in found.items():
        for recipe, by_seed in recipes.items():
            seeds = list(by_seed.values())
            cells = [str(len(seeds)), f"{fmean(seeds):.4f}", f"{max(seeds) - min(seeds):.4f}", "the control", "-"]
            if recipe != next(iter(recipes)):
                above = above_control(recipes, recipe)
                cells[3] = f"{fmean(above):+.2f} ± {stdev(above) / len(above) ** 0.5:.2f} %"
                cells[4] = ", ".join(f"{one:+.2f} %" for one in above)
            lines.append([package, recipe, *cells])
    return f"{settings}; parameters: {told}.\n\n{table(lines)}\n"


def of_gradients() -> str:
    """Return the table of bf16 communication and of codes in both directions, seed by seed."""
    known = of_results("gradient_convergence")
    runs, settings = known["runs"], known["settings"]
    words = {"bf16": "bf16 gathers, float32 gradients", "fp8": "FP8 gathers, FP8 gradients"}
    seeds = (f"seed {seed}" for seed in range(settings["seeds"]))
    lines = [["run", *seeds, "mean", "largest difference", "received per step"]]
    spread = {name: max(runs[name]["held_out"]) - min(runs[name]["held_out"]) for name in words}
    for name, what in words.items():
        run = runs[name]
        figures = (*run["held_out"], fmean(run["held_out"]), spread[name])
        received = f"{(run['gathered_bytes'] + run['gradient_bytes']) / 1e6:.2f} MB"
        lines.append([what, *(f"{figure:.4f}" for figure in figures), received])
    apart = abs(fmean(runs["fp8"]["held_out"]) - fmean(runs["bf16"]["held_out"]))
    return (
        f"{table(lines)}\n\n"
        f"{settings['steps']} steps of {settings['params']:,} parameters on {settings['ranks']} ranks. "
        f"The means differ by {apart:.4f}, within bf16's own spread of {spread['bf16']:.4f}.\n"
    )


def write_certificates(folder: Path) -> None:
    """Ask all recipes that are installed, torchao's too, and write what they answer."""
    logging.disable(logging.WARNING)  # of models that are made and thrown away
    found = {name: make() for name, make in rows(PROPERTIES)}
    facts = {name: {each: dataclasses.asdict(answer) for each, answer in row.items()} for name, row in found.items()}
    save(folder, "certificates", {"certificates": facts}, table_of_answers(found, PROPERTIES))


TABLES = {"convergence-packages": of_packages, "gradient_convergence": of_gradients}


def main() -> None:
    """Make what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = ("convergence", *TABLES, "certificates", *DRAWINGS)
    known = (*everything, "architectures")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where tables go")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="where pictures go")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in chosen.names or everything:
        if name in TABLES:
            (chosen.results / f"{name}.md").write_text(TABLES[name]())
        elif name in DRAWINGS:
            draw, size = DRAWINGS[name]
            picture(name, size, draw, chosen.pictures / "numerics")
        elif name == "certificates":
            write_certificates(chosen.results)
        elif name == "architectures":
            from benchmarks import _architectures

            _architectures.write(chosen.results)
        else:
            text = of_runs(RESULTS / "convergence", chosen.pictures / "convergence")
            (chosen.results / "convergence.md").write_text(text)


if __name__ == "__main__":
    main()
