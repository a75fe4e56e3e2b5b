"""How many bytes do FP8 layers save for the backward, and FP8 primary weights keep for their start?

    python -m benchmarks.memory [--quick]

1. What a layer keeps of a bfloat16 input with `fp8_saved_input`, and what that costs in the gradient of the weight: the
   ratio in dB of the gradient to its error, against the matmul of the same operands in float64.
2. Bytes of codes and of values before rounding for each weight, and the resident memory of a process that builds them.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import options, save, table
from fp8_common.recipe import get_recipe
from fp8_te_init import fp8_model_init, memory_report
from fp8_torch_fsdp import Float8TrainingConfig, convert_to_float8_training

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
ROWS, COLUMNS, OUT = 1024, 768, 512
STARTS = ("False", "True")
SIDE, LAYERS = 4096, 12


def layers(config: Float8TrainingConfig | None, count: int = 1) -> Any:
    """Return bfloat16 layers in FP8, or as they are without a configuration."""
    torch.manual_seed(1)
    made = nn.ModuleList(nn.Linear(COLUMNS, OUT, bias=False, dtype=torch.bfloat16) for _ in range(count))
    return made if config is None else convert_to_float8_training(made, config=config)


def saved_bytes(model: Any, x: Tensor) -> float:
    """Return the bytes that autograd keeps for each element of the input that all layers read, scales left out."""
    kept: dict[int, Tensor] = {}  # by address, for layers may keep the same tensor; held, so that none comes twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == x.numel():  # no weight is as large
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _outputs = [layer(x) for layer in model]
    return sum(tensor.nbytes for tensor in kept.values()) / x.numel()


def saved_inputs(config: Float8TrainingConfig | None) -> dict[str, float]:
    """Return what is saved by one layer, by three that share an input, by a frozen one; and the gradient's accuracy."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(ROWS, width, generator=generator) for width in (COLUMNS, OUT))
    x[:, ::64] *= 30  # some columns are larger
    x, dy = x.bfloat16().requires_grad_(), dy.bfloat16()
    model = layers(config)
    model[0](x).backward(dy)
    exact = dy.double().t() @ x.detach().double()
    error = (model[0].weight.grad.double() - exact).square().sum()
    return {
        "one layer": saved_bytes(layers(config), x),
        "three layers, one input": saved_bytes(layers(config, 3), x),
        "frozen weight": saved_bytes(layers(config).requires_grad_(False), x),
        "gradient, dB": 10 * math.log10(exact.square().sum() / error),
    }


def initial_values(start: str, side: int) -> dict[str, float]:
    """Return the bytes of a model of FP8 weights, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--build", start, "--side", str(side)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def build(start: str, side: int) -> None:
    """Build the model and print the bytes for each weight."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fp8_model_init(preserve_high_precision_init_val=start == "True"):
        model = nn.Sequential(*(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    report = memory_report(model)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    found = {"codes": report.codes, "values before rounding": report.copies, "peak of the process": peak}
    print(json.dumps({name: nbytes / report.parameters for name, nbytes in found.items()}))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__, rounds=1)
    parser.add_argument("--build", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, default=SIDE, help="features of the layers that are built")
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    chosen = parsed()
    if chosen.build:
        build(chosen.build, chosen.side)
        return
    configs: dict[str, Float8TrainingConfig | None] = {"bf16": None}
    for recipe in RECIPES[:1] if chosen.quick else RECIPES:
        for saved in (False, True):
            name = f"{recipe}{', fp8_saved_input' * saved}"
            configs[name] = Float8TrainingConfig(recipe=get_recipe(recipe), fp8_saved_input=saved)
    inputs = {name: saved_inputs(config) for name, config in configs.items()}
    starts = {start: initial_values(start, 256 if chosen.quick else chosen.side) for start in STARTS}
    tables = []
    per_weight = "bytes per weight, `preserve_high_precision_init_val=`"
    for head, found in (("bytes per element of the input", inputs), (per_weight, starts)):
        columns = list(next(iter(found.values())))
        rows = [(name, *(f"{row[column]:.2f}" for column in columns)) for name, row in found.items()]
        tables.append(table([(head, *columns), *rows]))
    save(chosen.results, "memory", {"saved_inputs": inputs, "initial_values": starts}, "\n\n".join(tables))


if __name__ == "__main__":
    main()
