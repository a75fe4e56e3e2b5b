"""You have a GPU: what of this project holds on it? Eight minutes, and one file that says so.

    python -m benchmarks.gpu [--minutes 8.5] [--only WORD ...] [--results FOLDER] [--pretend] [--list]

It needs torch, triton and pytest, JAX for the part about it, and torchao where that is to be compared; the packages
need not be installed. Each part runs in processes of its own, which end with its time: a part that raises, hangs or
dies costs its own results alone, and a part that is done early gives its time to the next ones. The file
gpu-DEVICE.json in benchmarks/results, or in $OUT where that is set, is written anew after each part; gpu-DEVICE.md is
its table. `--pretend`, which is what happens without a GPU, goes through the plan with a CPU in its place: small
shapes, the tests that have a twin on a CPU, and no verdicts.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import ROOT, SOURCES
from benchmarks import _gpu_grouped as ask_grouped
from benchmarks import _gpu_host as ask_host
from benchmarks import _gpu_jax as ask_jax
from benchmarks import _gpu_nccl as ask_nccl
from benchmarks import _gpu_parts as ask
from benchmarks import _gpu_published as ask_published
from benchmarks._common import RESULTS, machine, table
from benchmarks.modelled.models import CONTENDERS
from benchmarks.modelled.moe import MIXTURES

RECIPES = ("rowwise", "tensorwise", "tensorwise_delayed", "blockwise", "rowwise_with_gw_hp")


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the plan: a function of (report, argument), how long it may take, and what it decides.

    A part that is `asked` for runs where `--only` names it, and is not in the eight minutes.
    """

    name: str
    seconds: float
    claims: tuple[str, ...]
    run: Callable[[ask.Report, str], None]
    argument: str = ""
    asked: bool = False


def plan(gpu: str | None = "H100") -> list[Part]:
    """Return the parts in order: what decides most, and could end the process, comes first.

    Args:
        gpu: The GPU of the model of time that this is; None for others, of which nothing is claimed.
    """
    # torchao multiplies rows on GPUs alone
    recipes = ("tensorwise", "rowwise") if torch.cuda.is_available() else ("tensorwise",)
    peers = [f"torchao-{recipe}" for recipe in recipes] if importlib.util.find_spec("torchao") else []
    contenders = [*(f"ours-{recipe}" for recipe in RECIPES), *peers]
    bits = [name for name in ask.TESTS if importlib.util.find_spec(ask.NEEDS.get(name, "torch"))]
    mixtures = [" ".join(map(str, shape)) for shape in MIXTURES.values()]

    def together(name: str, seconds: float, each: Callable[[ask.Report, str], None], given: list[str]) -> Part:
        claims = {
            ask.layer: lambda _: [ask.FASTER],
            ask_jax.steps: ask_jax.claims,
            ask_host.where_time: lambda _: [ask_host.WAITS_LITTLE],
            ask_host.issue: lambda _: [ask_host.ISSUED],
            ask_grouped.grouped_matmuls: lambda _: [ask_grouped.SAME],
        }
        of = claims.get(each, lambda _: [ask.COMPILES, ask.FASTER])
        asked = {argument: [f"{argument}: {claim}" for claim in of(argument)] for argument in given}
        for who in asked.keys() & set(CONTENDERS) if gpu and each is ask.block else ():
            asked[who].append(f"{who}: {ask.MODELLED}")
        argument = f"{ask.name_of(each)}: {' / '.join(given)}"
        return Part(name, seconds, tuple(itertools.chain(*asked.values())), ask.together, argument)

    return [
        Part("rates", 15, tuple(ask.RATES.values()) if gpu else (), ask.rates),
        Part(
            "bits",
            155,
            tuple(f"{name}: {ask.EVERY_TEST}" for name in bits),
            ask.tests,
            f"{' '.join(bits)} -k not two_ranks",
        ),
        Part("two ranks", 60, (f"layers: {ask.EVERY_TEST}",), ask.tests, "layers -k two_ranks"),
        together("layers", 55, ask.layer, contenders),
        together("blocks", 85, ask.block, contenders),
        together("experts", 60, ask.experts, mixtures),
        Part("JAX", 70, (ask.CODES, ask.FASTER), ask_jax.layer),
        Part("te-init", 15, (ask.MASTERS,), ask.te_init),
        *(
            Part(
                f"kernels, {dtype}",
                12,
                tuple(ask.streamed(name, dtype) for name in sorted(ask.STREAMED)),
                ask.kernels,
                dtype,
            )
            for dtype in ("bfloat16", "float32")
        ),
        dataclasses.replace(together("experts, matmuls", 90, ask_grouped.grouped_matmuls, mixtures), asked=True),
        dataclasses.replace(together("where time goes", 150, ask_host.where_time, contenders), asked=True),
        dataclasses.replace(together("issue", 60, ask_host.issue, contenders), asked=True),
        dataclasses.replace(together("decoders of JAX", 400, ask_jax.steps, list(ask_jax.STEPS)), asked=True),
        Part("published", 60, (ask_published.SMALLER,), ask_published.steps, asked=True),
        Part("nccl", 180, tuple(ask_nccl.claims()), ask_nccl.nccl, asked=True),
    ]


def run_part(part: Part, seconds: float, folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Run a part in a process group of its own, and end all of it; return what it found and how it ended."""
    output = folder / f"{re.sub('[^a-z0-9]+', '-', part.name.lower())}.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # JAX would take most of the memory, which torch needs beside it
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [*ask.command_of(ask.name_of(part.run), output, on_gpu), "--argument", part.argument]
    start, log = time.monotonic(), output.with_suffix(".log")
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            ended = "finished" if code == 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(output.read_text()) if output.exists() else {"claims": {}, "figures": {}, "failures": {}}
    if ended != "finished":
        found["failures"][ended] = log.read_text(errors="replace")[-ask.MESSAGE :]
    return found | {"ended": ended, "seconds": round(time.monotonic() - start, 1)}


def run_plan(parts: Sequence[Part], minutes: float, results: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Run all parts in `minutes`; write what is known after each, and return it.

    What a file of the same device and versions says of other parts stays in it.
    """
    device = torch.cuda.get_device_name() if on_gpu else "pretended"
    name = f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}"
    share = 60 * minutes / sum(part.seconds for part in parts)
    folder, due = Path(tempfile.mkdtemp(prefix="gpu-")), time.monotonic()
    before = json.loads((results / f"{name}.json").read_text()) if (results / f"{name}.json").exists() else {}
    names = {part.name for part in parts}
    same = before.get("versions") == machine()["versions"]
    kept = {other: found for other, found in before.get("parts", {}).items() if same and other not in names}
    told = [*(part for part in plan(ask.modelled_gpu(on_gpu)) if part.name in kept), *parts]
    result: dict[str, Any] = {"device": device, "minutes": minutes, "parts": kept}
    try:
        for part in parts:
            due += share * part.seconds
            print(f"{part.name}: until {due - time.monotonic():.0f} s from now", flush=True)
            found = run_part(part, max(1.0, due - time.monotonic()), folder, on_gpu=on_gpu)
            result["parts"][part.name] = found
            print(f"{part.name}: {found['ended']}, {found['seconds']} s", flush=True)
            rows = [("part", "claim", "", "shown by"), *verdicts(told, result, on_gpu=on_gpu)]
            results.mkdir(parents=True, exist_ok=True)
            (results / f"{name}.json").write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
            (results / f"{name}.md").write_text(table(rows) + "\n")
            (results / f"{name}-times.md").write_text(times(result) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print((results / f"{name}.md").read_text(), f"\nSend us {results / name}.json: CONTRIBUTING.md says how.")
    return result


def verdicts(parts: Sequence[Part], result: Mapping[str, Any], *, on_gpu: bool) -> list[tuple[str, str, str, str]]:
    """Return for each claim of the plan: part, claim, proved, refuted or not reached, and what shows it."""
    rows = []
    for part in parts:
        found = result["parts"].get(part.name, {"claims": {}, "ended": "not begun"})
        for claim in dict.fromkeys((*part.claims, *found["claims"])):
            one = found["claims"].get(claim)
            if one is None:
                rows.append((part.name, claim, "not reached", found.get("missing", found["ended"])))
                continue
            cut = "" if found["ended"] == "finished" else f"; {found['ended']}"
            if cut and one["holds"] and claim.endswith(ask.EVERY_TEST):
                rows.append((part.name, claim, "not reached", one["shown"] + cut))  # of the tests, not all
                continue
            # a CPU says nothing about speed, but it can refute a program
            known = on_gpu or (not one["holds"] and ask.is_about_a_program(claim))
            verdict = ("proved" if one["holds"] else "refuted") if known else "pretended"
            rows.append((part.name, claim, verdict, one["shown"] + cut))
    return rows


def times(result: Mapping[str, Any]) -> str:
    """Return the table of what was timed in turns with bfloat16, the fastest first, and of what the model of time says.

    The row of bfloat16 holds the median over its turns with each of the others.
    """
    rows = [["what", "who", "x bfloat16", "measured", "modelled"]]
    for name, found in result["parts"].items():
        own, beside = [], []
        for claim, one in found["claims"].items():
            who, _, kind = claim.rpartition(": ")
            if kind == ask.FASTER:
                ratio, milliseconds = one["shown"].split(", ")
                said = found["claims"].get(f"{who}: {ask.MODELLED}", {"shown": "modelled -"})["shown"]
                if not who.replace(" ", "").isdigit():
                    beside.append(float(ratio.rstrip("x")) * float(milliseconds.removesuffix(" ms")))
                else:
                    who = "{} experts, {} x {}, {} rows".format(*who.split())
                own.append([name, who or "ours", ratio, milliseconds, said.rpartition("modelled ")[2]])
        if beside:
            own.append([name, "bf16", "1.000x", f"{median(beside):.2f} ms", "-"])
        rows += sorted(own, key=lambda row: -float(row[2].rstrip("x")))
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan, or one part; return 0 if nothing was refuted and all was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long all of it may take (8.5; 60 if pretended)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose names begin so; others' results stay")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    parser.add_argument("--pretend", action="store_true", help="take a CPU for a GPU; always, where there is none")
    parser.add_argument("--list", action="store_true", help="name the parts")
    for hidden in ("--part", "--output", "--argument"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available() and not chosen.pretend
    if chosen.part:
        module, _, name = chosen.part.partition(":")
        getattr(importlib.import_module(module), name)(
            ask.Report(Path(chosen.output), on_gpu=on_gpu), chosen.argument or ""
        )
        return 0
    only = tuple(chosen.only or ())
    parts = [p for p in plan(ask.modelled_gpu(on_gpu)) if p.name.startswith(only) and (only or not p.asked)]
    if chosen.list:
        extra = [part for part in plan() if part.asked and part not in parts]
        print("\n".join(f"{part.name}: {part.seconds:.0f} s{' more' * part.asked}" for part in [*parts, *extra]))
        return 0
    # who is told to end ends the part that runs, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = run_plan(parts, chosen.minutes or (8.5 if on_gpu else 60), chosen.results, on_gpu=on_gpu)
    return int(any(row[2] in ("refuted", "not reached") for row in verdicts(parts, result, on_gpu=on_gpu)))


if __name__ == "__main__":
    # parts are functions of this module by its name
    sys.exit(importlib.import_module("benchmarks.gpu").main())
