"""Training runs that answer: do models learn the same in FP8, and where does each recipe break?

    python -m benchmarks.convergence --state FOLDER [--results FOLDER] [--minutes M] [PART OF A NAME ...]
    python -m benchmarks.convergence --list
    python -m benchmarks.convergence --protocol MODULE:FUNCTION --state FOLDER   # a model of your own

A process makes the runs of `queue()` that no other one makes, the most useful first: start as many as there are cores,
on a GPU too. Stopped or killed, the same command goes on from the newest checkpoint in FOLDER, on a CPU bit for bit. A
finished run is a line of benchmarks/results/convergence/QUESTION.jsonl; `benchmarks.figures` makes tables and pictures
of them.

A run trains the layers of `convert_to_float8_training`, float32 weights under bfloat16 autocast, on the source of
Python's standard library. Gathers in FP8 under FSDP2 change no number, so many ranks would train the same. All recipes
share parameters, windows, learning rates and held-out windows of their seed. On a GPU that multiplies FP8 its products
are used, and steps are replayed as a CUDA graph; elsewhere products are emulated: the same operands, accumulated in
float32. On a CPU those of bfloat16 matrices are computed in float32 too and rounded once (`Bfloat16Matmuls`).
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks._models import Bfloat16Matmuls
from benchmarks._plan import RATE, RESULTS, ROOT, TRUNK, Spec, is_finished, queue, record
from benchmarks._training import Training
from examples._report import Corpus, load_corpus


def finish(spec: Spec, corpus: Corpus, options: argparse.Namespace, end: float) -> bool:
    """Train until the run has ended, whose result is then written, or the time is up; returns whether it has ended.

    Args:
        spec: The run.
        corpus: What it reads.
        options: Folders, device and seconds between checkpoints.
        end: `time.monotonic()` at which to stop behind a checkpoint.
    """
    saved = options.state / f"{spec.name}.pt"
    run, commit = Training(spec, corpus, options.device), current_commit()
    if saved.exists():
        run.load(saved)
    elif spec.trunk:
        run.branch(options.state / f"{spec.start.name}.pt")
    if commit not in run.commits:
        run.commits.append(commit)
    print(f"{spec.name}: from step {len(run.losses)} of {spec.steps}", flush=True)
    clock, written = time.process_time(), time.monotonic()
    while len(run.losses) < spec.steps and (not run.losses or math.isfinite(run.losses[-1])):
        run.step()
        if run.is_due:
            run.held_out.append(run.measure())
        run.seconds, clock = run.seconds + time.process_time() - clock, time.process_time()
        if (now := time.monotonic()) - written >= options.checkpoint_seconds or now > end:
            run.save(saved)
            print(f"{spec.name}: step {len(run.losses)}, loss {run.losses[-1]:.4f}, {run.seconds:.0f} s", flush=True)
            written = time.monotonic()
            if now > end:
                return False
    if spec.schedule == TRUNK:
        run.save(saved)  # where branches start
    else:
        saved.unlink(missing_ok=True)
    record(options.results, outcome(run))
    print(f"{spec.name}: finished after {run.seconds:.0f} s", flush=True)
    return True


def outcome(run: Training) -> dict[str, Any]:
    """Return what is recorded of a run that has ended."""
    diverged = not all(map(math.isfinite, (run.losses[-1], *run.held_out)))
    tail = run.losses[-max(1, len(run.losses) // 10) :]
    return {
        "spec": asdict(run.spec),
        # JSON knows no NaN
        "held_out": [value if math.isfinite(value) else None for value in run.held_out],
        # of the last tenth of the steps, whose windows all recipes of a seed share
        "training": None if diverged else sum(tail) / len(tail),
        "diverged_at": len(run.losses) if diverged else None,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "commits": run.commits,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        "data": run.data,
        "cpu_seconds": round(run.seconds, 1),
    }


def current_commit() -> str:
    """Return the commit of this checkout, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    # a copy without a repository is told by the variable
    return (
        os.environ.get("COMMIT") or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


def main() -> int:
    """Make the runs that the command line asks for; returns 1 if some failed or are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only runs whose name contains one of these")
    parser.add_argument("--state", type=Path, help="where checkpoints are, outside of the repository")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop behind a checkpoint after this time")
    parser.add_argument("--checkpoint-seconds", type=float, default=150, help="between checkpoints (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--list", action="store_true", help="print the queue, with a mark at what is finished")
    parser.add_argument("--spec", action="append", help="make this run, a JSON object, instead of the queue's")
    own = parser.add_argument_group("a model of your own (docs/numerics/cost.md)")
    own.add_argument("--protocol", metavar="MODULE:FUNCTION", help="of what is trained")
    own.add_argument("--steps", type=int, default=1000, help="optimizer steps of a run (%(default)s)")
    own.add_argument("--learning-rate", type=float, default=RATE, help="the highest of the schedule (%(default)s)")
    own.add_argument("--recipes", default="tensorwise,rowwise", help="separated by commas (%(default)s)")
    own.add_argument("--width", type=float, default=0.1, help="half of the interval to reach, percent (%(default)s)")
    own.add_argument("--max-seeds", type=int, default=64, help="do not start runs beyond these (%(default)s)")
    options = parser.parse_args()
    runs = [Spec(**json.loads(one)) for one in options.spec or ()] or list(dict.fromkeys(queue()))
    runs = [spec for spec in runs if not options.parts or any(part in spec.name for part in options.parts)]
    missing = [spec for spec in runs if is_missing(spec, options)]
    if options.list:
        print("\n".join(f"{'x ' if spec not in missing else '  '}{spec.name}" for spec in runs))
        return 0
    if options.state is None or options.state.resolve().is_relative_to(ROOT):
        parser.error("--state must be a folder outside of the repository: checkpoints are large")
    if options.protocol and options.results == RESULTS:
        options.results = options.state / "results"
    for folder in (options.state, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    if options.protocol:
        from benchmarks import _protocol

        if problem := _protocol.problem(options):
            parser.error(problem)
        return _protocol.measure(options, make)
    return make(missing, options)


def is_missing(spec: Spec, options: argparse.Namespace) -> bool:
    """Whether a run is to be made: it is not recorded, or it is a trunk whose end is not in the folder of states."""
    end = spec.schedule != TRUNK or (options.state is not None and (options.state / f"{spec.name}.pt").exists())
    return not (is_finished(options.results, spec) and end)


def make(missing: list[Spec], options: argparse.Namespace) -> int:
    """Make the runs that no other process makes, one after the other; one that fails is told, and the others go on."""
    torch.set_num_threads(1)
    corpus, end, failed = load_corpus(), time.monotonic() + 60 * options.minutes, 0
    for spec in missing:
        if not is_missing(spec, options):
            continue
        with (options.state / f"{spec.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_missing(spec, options):
                    continue  # another process has made it meanwhile
                if spec.trunk and is_missing(spec.start, options):
                    print(f"{spec.name}: left, because {spec.start.name} is not finished", flush=True)
                    failed += 1
                    continue
                with Bfloat16Matmuls() if options.device == "cpu" else contextlib.nullcontext():
                    if not finish(spec, corpus, options, end):
                        return 1
            except BlockingIOError:
                continue
            except Exception:
                traceback.print_exc()
                print(f"{spec.name}: failed", flush=True)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
