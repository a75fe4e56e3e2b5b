"""What would a training step of a block cost on a GPU? Modelled: nothing is launched, and no GPU is needed.

    python -m benchmarks.modelled_step [--model block|linear|moe] [--width 4096] [--tokens 8192] [--only NAME ...]

The models are a Llama block, a linear layer and a Qwen3-MoE block. Tensors are fake, on a GPU that torch is made to
believe in; launches, bytes and FLOPs are counted, and priced by the assumptions of `benchmarks.modelled.prices`. Writes
results/modelled_MODEL_WIDTH.json and .md. Compiled steps need triton; a block takes two to three minutes of a
processor. Only the versions of constraints-modelled.txt take the GPU for one.
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
HEADS += ("modelled, H200", "x bf16", "x torchao")
RATES = ("bandwidth", "bf16", "fp8", "attention")
SHOWN = "ours-rowwise", "compiled"
"""The step of which the table says what each rate moves."""


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
        "H100_milliseconds_if_a_rate_were_10_percent_higher": {
            rate: round(1e3 * seconds(step, GPUS["H100"].faster(rate, 1.1), mode), 3) for rate in RATES
        },
    }


def rendered(rows: list[dict[str, Any]], model: str, width: int) -> str:
    """Return the table, and what the model of time assumes; ratios are of times in one mode, above 1 this is faster."""
    steps = {(found["mode"], found["contender"]): found for found in rows}
    lines = [(f"{model}, width {width}", *HEADS)]
    for (mode, name), found in steps.items():
        peers = [(mode, "bf16"), (mode, f"torchao-{name.partition('-')[2]}")]
        cells = [f"{name.replace('-', ', ')}, {mode}", f"{found['launches']} ({found['small_launches']})"]
        cells += [str(found["host_operators"]), f"{found['bytes_outside_products'] / 1e9:.2f}"]
        for gpu, own in found["modelled_milliseconds"].items():
            theirs = [steps[peer]["modelled_milliseconds"][gpu] if peer in steps else None for peer in peers]
            cells += [f"{own:.2f} ms", *("-" if other is None else f"{other / own:.2f}" for other in theirs)]
        lines.append(tuple(cells))
    assumed = assumptions()
    percent = {name: f"{100 * share:.0f} %" for name, share in assumed["share_of_data_sheet"].items()}
    return (
        f"{table(lines)}\n\nAssumed: {percent['bandwidth']} of the data sheet's bandwidth, {percent['bf16']} of its "
        f"FLOPs in bfloat16 and {percent['fp8']} in FP8, whatever the scales, {percent['attention']} for attention, "
        f"{assumed['seconds_per_launch']['eager'] * 1e6:.0f} µs more for each launch of an eager step. Delayed scales "
        "are there before the step, and their synchronization is not part of it; compiled weights are not gathered in "
        f"FP8.{sensitivity(steps)}"
    )


def sensitivity(steps: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return a sentence about what each assumed rate moves, where the steps for it are there."""
    name, mode = SHOWN
    own, plain = steps.get((mode, name)), steps.get((mode, "bf16"))
    if own is None or plain is None:
        return ""
    key = "H100_milliseconds_if_a_rate_were_10_percent_higher"
    moved = ", ".join(f"{plain[key][rate] / own[key][rate]:.2f} ({rate})" for rate in RATES)
    now = plain["modelled_milliseconds"]["H100"] / own["modelled_milliseconds"]["H100"]
    shown = f"{name.replace('-', ', ')}, {mode}"
    return f" With one rate of an H100 10 % higher than that, the {now:.2f} of {shown} would be {moved}."


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
