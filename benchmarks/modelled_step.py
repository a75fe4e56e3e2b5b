"""What would a training step of a block cost on a GPU? Modelled: nothing is launched, and no GPU is needed.

    python -m benchmarks.modelled_step [--model block|linear|moe] [--width 4096] [--tokens 8192] [--only NAME ...]

The models are a Llama block, a linear layer and a Qwen3-MoE block. Tensors are fake, on a GPU that torch is made to
believe in; launches, bytes and FLOPs are counted, and priced by the assumptions of `benchmarks.modelled.prices`. Writes
results/modelled_MODEL_WIDTH.json and .md. Compiled steps need triton; a block takes two to three minutes of a
processor.
"""

import argparse
import os
import sys
from typing import Any

import torch

from benchmarks._common import options, save, table
from benchmarks.modelled.models import MODELS, MODES, contenders, measure
from benchmarks.modelled.pretended_gpu import pretend_gpu
from benchmarks.modelled.prices import GPUS, assumptions, seconds
from benchmarks.modelled.record import Step

HEADS = ("launches (small)", "host operators", "GB outside of matmuls", "modelled, H100", "x bf16", "x torchao")


def row(contender: str, mode: str, step: Step) -> dict[str, Any]:
    """Return the figures of one step."""
    return {
        "contender": contender,
        "mode": mode,
        "launches": len(step.kernels),
        "small_launches": step.small,
        "host_operators": step.host_operators,
        "waits": step.waits,
        "bytes_outside_products": step.bytes_outside,
        "teraflops": {kind: round(step.flops(kind) / 1e12, 3) for kind in ("bf16", "fp8", "attention")},
        "modelled_milliseconds": {name: round(1e3 * seconds(step, gpu, mode), 3) for name, gpu in GPUS.items()},
    }


def rendered(rows: list[dict[str, Any]], model: str, width: int) -> str:
    """Return the table, and what the model of time assumes; ratios are of times in one mode, above 1 this is faster."""
    times = {(found["mode"], found["contender"]): found["modelled_milliseconds"]["H100"] for found in rows}
    lines = [(f"{model}, width {width}", *HEADS)]
    for found in rows:
        mode, name = found["mode"], found["contender"]
        peers = [(mode, "bf16"), (mode, f"torchao-{name.partition('-')[2]}")]
        lines.append(
            (
                f"{name.replace('-', ', ')}, {mode}",
                f"{found['launches']} ({found['small_launches']})",
                str(found["host_operators"]),
                f"{found['bytes_outside_products'] / 1e9:.2f}",
                f"{times[mode, name]:.2f} ms",
                *(f"{times[peer] / times[mode, name]:.2f}" if peer in times else "-" for peer in peers),
            )
        )
    assumed = assumptions()
    percent = {name: f"{100 * share:.0f} %" for name, share in assumed["share_of_data_sheet"].items()}
    return (
        f"{table(lines)}\n\nAssumed: {percent['bandwidth']} of the data sheet's bandwidth, {percent['bf16']} of its "
        f"FLOPs in bfloat16 and {percent['fp8']} in FP8, whatever the scales, {percent['attention']} for attention, "
        f"{assumed['seconds_per_launch']['eager'] * 1e6:.0f} µs more for each launch of an eager step."
    )


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--model", choices=list(MODELS), default="block")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of " + "; ".join(map(str, map(contenders, MODELS))))
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.model, chosen.modes, chosen.only = "linear", ["eager"], ["bf16", "ours-tensorwise"]
    return chosen


def main() -> None:
    """Count, price and write."""
    chosen = parsed()
    torch.set_num_threads(1)
    pretend_gpu()
    rows = []
    for mode in chosen.modes:
        for contender in chosen.only or contenders(chosen.model):
            step = measure(contender, mode, model=chosen.model, width=chosen.width, tokens=chosen.tokens)
            rows.append(row(contender, mode, step))
            print(contender, mode, rows[-1]["modelled_milliseconds"], flush=True)
    result = {"kind": "modelled: nothing was launched", "assumptions": assumptions(), "steps": rows}
    result |= {"model": chosen.model, "width": chosen.width, "tokens": chosen.tokens}
    save(chosen.results, f"modelled_{chosen.model}_{chosen.width}", result, rendered(rows, chosen.model, chosen.width))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the pretended GPU cannot be taken down in order
