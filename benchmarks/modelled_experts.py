"""What do the experts of published mixtures launch, move and multiply in a step? Modelled: nothing is launched.

    python -m benchmarks.modelled_experts [--quick] [--modes compiled eager]

Forward and backward of the two stacks of weights and of SiLU between them, rows sorted by expert and spread evenly: in
bfloat16, in FP8 by torchao's grouped row-wise recipe, and in FP8 by ours. Counted as `benchmarks.modelled_step` counts,
in one run; a compilation takes a minute. Only the versions of constraints-modelled.txt have all three.
"""

import os
import sys
from typing import Any

import torch

from benchmarks._common import options, save, table
from benchmarks.modelled.models import MODES, measure
from benchmarks.modelled.moe import MIXTURES
from benchmarks.modelled.pretended_gpu import pretend_gpu
from benchmarks.modelled.prices import GPUS, assumptions, seconds
from benchmarks.modelled.record import Step

CONTENDERS = ("bf16", "torchao-rowwise", "ours-rowwise")
HEAD = ("launches (small)", "matmuls", "GB beside matmuls", "modelled, H100", "x bf16", "x torchao")


def counted(step: Step, mode: str) -> dict[str, Any]:
    """Return the figures of a step."""
    return {
        "launches": len(step.kernels),
        "small_launches": step.small,
        "matmuls": {kind: sum(one.kind == kind for one in step.kernels) for kind in ("bf16", "fp8")},
        "teraflops": {kind: round(step.flops(kind) / 1e12, 3) for kind in ("bf16", "fp8")},
        "bytes_beside_matmuls": step.bytes_outside,
        "modelled_milliseconds": {name: round(1e3 * seconds(step, gpu, mode), 3) for name, gpu in GPUS.items()},
    }


def rendered(found: dict[str, dict[str, Any]]) -> str:
    """Return the table; ratios are of times in one mode, above 1 this is faster."""
    lines = [("experts", *HEAD)]
    for name, steps in found.items():
        for who, one in steps.items():
            contender, _, mode = who.partition(", ")
            own = one["modelled_milliseconds"]["H100"]
            others = (steps.get(f"{peer}, {mode}") for peer in ("bf16", "torchao-rowwise"))
            ratios = [f"{other['modelled_milliseconds']['H100'] / own:.2f}" if other else "-" for other in others]
            kinds = [f"{count} {kind.replace('fp', 'FP')}" for kind, count in one["matmuls"].items() if count]
            gigabytes = f"{one['bytes_beside_matmuls'] / 1e9:.2f}"
            cells = [f"{one['launches']} ({one['small_launches']})", ", ".join(kinds), gigabytes, f"{own:.2f} ms"]
            lines.append((f"{name}: {contender.replace('-', ', ')}, {mode}", *cells, *ratios))
    return table(lines)


def main() -> None:
    """Count, price and write; what is there is written after each mixture."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    pretend_gpu()
    found: dict[str, dict[str, Any]] = {}
    for name, mixture in list(MIXTURES.items())[: 1 if chosen.quick else None]:
        found[name] = {}
        for mode in ("eager",) if chosen.quick else chosen.modes:
            for who in ("bf16", "ours-rowwise") if chosen.quick else CONTENDERS:
                step = measure(who, mode, model=name, width=mixture.width, tokens=mixture.rows)
                found[name][f"{who}, {mode}"] = counted(step, mode)
        result = {"kind": "modelled: nothing was launched", "assumptions": assumptions(), "experts": found}
        save(chosen.results, "modelled_experts", result, rendered(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the pretended GPU cannot be taken down in order
