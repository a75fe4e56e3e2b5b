"""`plot`: speed-ups of every configuration over the number of devices, as a picture."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fp8_common._errors import Fp8Error, Fp8UnsupportedError
from fp8_common.advise._choices import CHOICES, Choice
from fp8_common.advise._estimate import Job
from fp8_common.advise._recommend import advise

WORLD_SIZES = tuple(2**power for power in range(3, 13))
"""8 to 4096."""


def speed_ups(
    job: Job, ranks: Sequence[int] = WORLD_SIZES, choices: Sequence[Choice] = CHOICES
) -> dict[str, tuple[float, ...]]:
    """Return for every configuration how many times faster than the first it is, on each number of devices.

    Raises:
        Fp8Error: A number of ranks does not fill the nodes, or bf16 was measured to be faster than the model says.
    """
    advised = [advise(dataclasses.replace(job, ranks=number), choices) for number in ranks]
    return {
        choice.name: tuple(advice.speed_up(advice.estimates[number]) for advice in advised)
        for number, choice in enumerate(choices)
    }


def plot(job: Job, path: str | Path, ranks: Sequence[int] = WORLD_SIZES, choices: Sequence[Choice] = CHOICES) -> None:
    """Draw `speed_ups` into a file, whose ending says what it is (.svg, .png, .pdf).

    Raises:
        Fp8UnsupportedError: matplotlib is not installed.
        Fp8Error: The file cannot be written, or `speed_ups` refuses.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Fp8UnsupportedError(
            "A plot needs matplotlib, which is not installed. Run: pip install 'fp8-common[plot]'"
        ) from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, values in speed_ups(job, ranks, choices).items():
        axes.plot(ranks, values, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ranks), [str(number) for number in ranks])
    axes.set_xlabel("devices")
    axes.set_ylabel(f"speed-up over {choices[0].name}, modelled")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Fp8Error(f"{str(path)!r} cannot be written as a picture: {error}.") from error
