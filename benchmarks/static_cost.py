"""The static cost of a training step of a block, without a GPU: launches, bytes, FLOPs and a modelled time.

    python -m benchmarks.static_cost [--model block|linear|moe] [--width 4096] [--tokens 8192] [--only NAME ...]
                                     [--save]

The models are a Llama block, a linear layer and a Qwen3-MoE block. Tensors are fake, on a GPU that torch is made to
believe in; nothing is compiled for it or launched. Every time is modelled, by the assumptions of
`benchmarks.modelled.prices`. `--save` puts the rows into benchmarks/results/static_cost.json, beside those of other
widths, and the documents' tables follow from that file: `python -m benchmarks.render_static_cost`. Compiled steps need
triton, the rows of torchao torchao; all contenders of a block take two to three minutes of a processor.
"""

import argparse
import json
import os
import sys
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from benchmarks.modelled.models import MODELS, MODES, contenders, measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
from benchmarks.modelled.prices import GPUS, assumptions, seconds
from benchmarks.modelled.record import SMALL, Step

RESULT = Path(__file__).parent / "results" / "static_cost.json"


def row(contender: str, mode: str, step: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one step."""
    return {
        "model": options.model,
        "width": options.width,
        "tokens": options.tokens,
        "contender": contender,
        "mode": mode,
        "launches": len(step.kernels),
        "small_launches": step.small,
        "host_operators": step.host_operators,
        "waits": step.waits,
        "bytes_outside_products": step.bytes_outside,
        "bytes_read_again": step.read_again,
        "teraflops": {kind: round(step.flops(kind) / 1e12, 3) for kind in ("bf16", "fp8", "attention")},
        "fp8_products": {name: round(flops / 1e12, 3) for name, flops in step.products.items()},
        "modelled_milliseconds": {name: round(1e3 * seconds(step, gpu, mode), 3) for name, gpu in GPUS.items()},
    }


def summary(found: dict[str, Any]) -> str:
    """Return one line."""
    flops = found["teraflops"]
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found["modelled_milliseconds"].items())
    return (
        f"{found['contender']:24} {found['mode']:8} {found['launches']:4} launches ({found['small_launches']} small), "
        f"{found['host_operators']:4} host operators, {found['waits']} waits, "
        f"{found['bytes_outside_products'] / 1e9:6.2f} GB outside of products, {flops['bf16']:.2f} TFLOP bf16, "
        f"{flops['fp8']:.2f} FP8; modelled: {times}"
    )


def details(step: Step, options: argparse.Namespace) -> list[str]:
    """Return what each launch of a linear layer moves, in bytes per element of x [M, K], w [N, K] and dy [M, N]."""
    hidden = options.width * 7 // 2
    sizes = {options.tokens * options.width: "x", hidden * options.width: "w", options.tokens * hidden: "dy"}
    lines, total = [], Counter()
    for kernel in (k for k in step.kernels if k.kind == "other" and k.bytes >= SMALL):
        moved = {(way, sizes[n]): size / n for (way, n), size in kernel.traffic.items() if n in sizes}
        for (_, name), amount in moved.items():
            total[name] += amount
        lines.append(f"    {kernel.name[:50]:50} " + ", ".join(f"{w} {b:.3g} {n}" for (w, n), b in moved.items()))
    return [*lines, "    sum: " + ", ".join(f"{total[name]:.3g} {name}" for name in sizes.values())]


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """Put the rows into a file, in place of those of the same step."""
    key = ("model", "width", "tokens", "mode", "contender")
    old = json.loads(path.read_text()) if path.exists() else {"steps": [], "versions": {}}
    steps = {tuple(str(entry[name]) for name in key): entry for entry in [*old["steps"], *rows]}
    result = {
        "schema": 1,
        "kind": "modelled: nothing was launched",
        "versions": old["versions"] | versions(),  # rows of what is not installed now stay
        "assumptions": assumptions(),
        "steps": [steps[name] for name in sorted(steps)],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of what was traced, as far as it is installed."""
    installed = {distribution.name: distribution.version for distribution in distributions()}
    return {name: installed[name] for name in ("torch", "triton", "torchao") if name in installed}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="block")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of " + "; ".join(map(str, map(contenders, MODELS))))
    parser.add_argument("--save", type=Path, nargs="?", const=RESULT, metavar="PATH")
    return parser.parse_args(arguments)


def main() -> int:
    """Print every row; return 1 if a contender failed."""
    options, rows, failures = parse(sys.argv[1:]), [], 0
    pretend_gpu()
    for mode in options.modes:
        for contender in options.only or contenders(options.model):
            try:
                step = measure(contender, mode, model=options.model, width=options.width, tokens=options.tokens)
            except Exception as error:  # the others go on; the exit status says that one failed
                failures += 1
                print(f"{contender} {mode} failed: {type(error).__name__}: {error}"[:1000], flush=True)
                continue
            rows.append(row(contender, mode, step, options))
            print(summary(rows[-1]), flush=True)
            if options.model == "linear":
                print(*details(step, options), sep="\n", flush=True)
    if options.save:
        save(rows, options.save)
    return int(failures > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the pretended GPU cannot be taken down in order
