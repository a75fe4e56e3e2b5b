"""The report of `fp8 advise`: what each configuration costs on a machine, over one or several numbers of ranks."""

import argparse
import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

from fp8_common._cli_text import table
from fp8_common._errors import Fp8Error, Fp8UnsupportedError
from fp8_common.advise import ACCELERATORS, LINKS, SHAPES, Accelerator, Advice, Estimate, Job, Links, ModelShape, advise

RATES = ("bf16", "fp8", "attention", "bandwidth")
NETWORK = ("node", "inside", "between", "latency")
MOST = 4
"""Rows that are shown without --all, besides the best one in bf16."""
HEADER = ("configuration", "step", "speed-up", "exposed", "gathers", "gradients", "between nodes", "casts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `fp8 advise` its options."""
    add = parser.add_argument
    add("--model", default="llama3-8b", help=f"{', '.join(SHAPES)}, or the config.json of a decoder")
    add("--module", metavar="PATH", help="instead: package.module:factory, a function that returns a torch module")
    add("--active", type=int, metavar="N", help="experts that see a token, with --module, if the model does not say")
    add("--linear", metavar="SHAPES", help="instead: one block's layers, out x in: 4096x4096,14336x4096,4096x14336")
    add("--blocks", type=int, default=32, help="number of blocks, with --linear (default %(default)s)")
    add("--vocabulary", type=int, default=0, help="rows of the embedding, with --linear (default: none)")
    add("--ranks", default="8", help="devices, over which all is sharded; several: 8,64,512 (default %(default)s)")
    add("--device", choices=ACCELERATORS, default="h100", help="its rates (default %(default)s)")
    add("--links", choices=LINKS, default="infiniband-400", help="the network (default %(default)s)")
    add("--rates", metavar="R", help="rates of yours in their place: bf16=6e14,fp8=1.1e15,inside=3e11,latency=1e-5")
    add("--tokens", type=int, default=8192, help="of a micro-batch on one device (default %(default)s)")
    add("--sequence", type=int, default=8192, help="length of a sequence (default %(default)s)")
    add("--micro-batches", type=int, default=1, help="of one optimizer step (default %(default)s)")
    add("--recompute", type=float, default=0.0, help="share of the forward that is computed twice (default 0)")
    add("--plot", metavar="FILE", help="draw speed-ups over 8 to 4096 devices (.svg, .png, .pdf; needs matplotlib)")
    add("--all", action="store_true", help=f"show every configuration, not the {MOST} fastest")
    add("--measured", type=float, metavar="T", help="tokens per second and device that bf16 reaches, if you know it")


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the job of each number of ranks.

    Raises:
        Fp8Error: An option cannot be read.
    """
    try:
        ranks = [int(text) for text in options.ranks.split(",")]
    except ValueError as error:
        raise Fp8Error(f"--ranks takes whole numbers like 8 or 8,64,512, got {options.ranks!r}.") from error
    accelerator, links = _rates(options.rates, ACCELERATORS[options.device], LINKS[options.links])
    one = Job(
        shape=_shape(options),
        ranks=ranks[0],
        tokens=options.tokens,
        sequence=options.sequence,
        micro_batches=options.micro_batches,
        recompute=options.recompute,
        accelerator=accelerator,
        links=links,
        measured=options.measured,
    )
    return [dataclasses.replace(one, ranks=number) for number in ranks]


def _rates(given: str | None, accelerator: Accelerator, links: Links) -> tuple[Accelerator, Links]:
    """Return device and network with the rates that a text like "bf16=6e14,inside=3e11" replaces."""
    for pair in (given or "").split(",") if given else ():
        name, _, text = pair.partition("=")
        owner = accelerator if name in RATES else links
        try:
            value = type(getattr(owner, name))(float(text))
        except (AttributeError, ValueError, OverflowError):
            value = 0
        if name not in (*RATES, *NETWORK) or not 0 < value < math.inf:
            names = ", ".join((*RATES, *NETWORK))
            raise Fp8Error(f"--rates takes positive numbers like bf16=6e14,inside=3e11 for {names}; got {pair!r}.")
        if owner is accelerator:
            changed: dict[str, Any] = {name: value, "source": "given with --rates"}
            accelerator = dataclasses.replace(accelerator, **changed)
        else:
            links = dataclasses.replace(links, **{name: value})
    return accelerator, links


def _shape(options: argparse.Namespace) -> ModelShape:
    if options.linear:
        return ModelShape.parse(options.linear, options.blocks, options.vocabulary)
    if options.module:
        if importlib.util.find_spec("torch") is None:
            raise Fp8UnsupportedError(
                "--module needs torch, which is not installed. Run: pip install 'fp8-common[torch]'"
            )
        from fp8_common.torch._model_shape import shape_of_import

        return shape_of_import(options.module, options.active)
    return SHAPES.get(options.model) or ModelShape.from_config(Path(options.model))


def facts(job: Job) -> dict[str, Any]:
    """Return job, estimates and advice as data."""
    advice = advise(job)
    estimates = [
        {**dataclasses.asdict(one), "seconds": one.seconds, "speed_up": advice.speed_up(one)}
        for one in advice.estimates
    ]
    return {
        "job": dataclasses.asdict(job),
        "parameters": job.shape.parameters,
        "estimates": estimates,
        "best": advice.best.choice.name,
        "reason": advice.reason,
    }


def text(job: Job, *, show_all: bool = False) -> str:
    """Return the report for people: what to take, bf16, and the fastest configurations, or all."""
    advice = advise(job)
    estimates = advice.estimates
    shown = list(estimates)
    if not show_all:
        fastest = sorted(estimates, key=lambda one: one.seconds)[:MOST]
        shown = [one for one in estimates if one in fastest or one in (estimates[0], advice.best, advice.best_bf16)]
    rows = [HEADER, *(_row(advice, one) for one in shown)]
    first = estimates[0]
    return "\n".join(
        [
            f"{job.shape.parameters / 1e9:.2f} billion parameters on {job.ranks} devices, modelled, not measured; "
            f"weights, gradients and optimizer state {_bytes(first.state_memory)} for each device",
            f"take: {advice.best.choice.name}. {advice.reason}",
            *table(rows, "  "),
            *[f"  {len(estimates) - len(shown)} slower ones: --all"] * (len(shown) < len(estimates)),
        ]
    )


def _row(advice: Advice, one: Estimate) -> tuple[str, ...]:
    return (
        one.choice.name,
        f"{1e3 * one.seconds:.0f} ms",
        f"{advice.speed_up(one):.2f}x",
        f"{1e3 * one.exposed:.0f} ms",
        _bytes(one.gather_bytes),
        _bytes(one.reduce_bytes),
        _bytes(one.between_bytes),
        f"{1e3 * one.casts:.0f} ms",
    )


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB"
