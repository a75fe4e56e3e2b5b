"""What FP8 layers keep of their inputs for the backward, and the error of the weight's gradient, on a CPU.

    python -m benchmarks.saved_inputs

Every recipe with and without `fp8_saved_input`: bytes for each element of a bfloat16 input, kept by one layer, by three
layers that share the input, and by one layer whose weight is frozen; and the ratio in dB of the gradient of the weight
to its error, against the product of the same bfloat16 operands in float64. JSON and the table of the guide.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demos.common.machine import machine_facts, package_versions
from fp8_common import get_recipe
from fp8_torch_fsdp import Float8LinearConfig, convert_to_float8_training

HERE = Path(__file__).parent
RESULT = HERE / "results" / "saved_inputs.json"
PAGE = HERE.parent / "docs" / "guides" / "torch-fsdp-speed.md"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
ROWS, COLUMNS, OUT = 1024, 768, 512


def operands() -> tuple[Tensor, Tensor]:
    """Return input and gradient of the output, bfloat16; 1 of 64 columns of the input is 30 times as large."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x[:, ::64] *= 30
    return x.bfloat16(), torch.randn(ROWS, OUT, generator=generator).bfloat16()


def layers(config: Float8LinearConfig | None, count: int = 1) -> Any:
    """Return bfloat16 layers in FP8, or as they are without a configuration."""
    torch.manual_seed(1)
    made = nn.ModuleList(nn.Linear(COLUMNS, OUT, bias=False, dtype=torch.bfloat16) for _ in range(count))
    return made if config is None else convert_to_float8_training(made, config=config)


def kept_bytes(model: Any, x: Tensor) -> float:
    """Return the bytes that autograd keeps for each element of the input that all layers read, scales left out."""
    kept: dict[int, Tensor] = {}  # by address, for layers may keep the same tensor; held, so that none comes twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == x.numel():  # no weight is as large
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _outputs = [layer(x) for layer in model]
    return sum(tensor.nbytes for tensor in kept.values()) / x.numel()


def gradient_db(model: Any) -> float:
    """Return 10 log10 of the energy of the weight's gradient over that of its error."""
    x, dy = operands()
    model[0](x).backward(dy)
    wanted, found = dy.double().t() @ x.double(), model[0].weight.grad
    return 10 * math.log10(wanted.square().sum() / (found.double() - wanted).square().sum())


def measure_one(config: Float8LinearConfig | None) -> dict[str, float]:
    """Return the figures of one way."""
    x = operands()[0].requires_grad_()
    frozen = layers(config)
    frozen.requires_grad_(False)
    found = {
        "one": kept_bytes(layers(config), x),
        "three": kept_bytes(layers(config, 3), x),
        "frozen": kept_bytes(frozen, x),
        "gradient_db": gradient_db(layers(config)),
    }
    return {name: round(value, 4) for name, value in found.items()}


def configured(recipe: str, saved: bool) -> Float8LinearConfig:
    """Return the configuration of one way."""
    return Float8LinearConfig(recipe=get_recipe(recipe), fp8_saved_input=saved)


def measure() -> dict[str, Any]:
    """Return the file's content."""
    rows = [{"recipe": "bf16", "fp8_saved_input": None, **measure_one(None)}]
    for recipe in RECIPES:
        for saved in (False, True):
            rows.append({"recipe": recipe, "fp8_saved_input": saved, **measure_one(configured(recipe, saved))})
            print(rows[-1], flush=True)
    settings = {"rows": ROWS, "columns": COLUMNS, "out_features": OUT}
    return {"settings": settings, "machine": machine_facts(), "versions": package_versions(), "rows": rows}


def table(kept: dict[str, Any]) -> str:
    """Return the table of the guide."""
    lines = [
        "| | `fp8_saved_input` | one layer | three layers, one input | frozen weight | gradient of the weight |",
        "|---|---|---|---|---|---|",
    ]
    for row in kept["rows"]:
        option = "-" if row["fp8_saved_input"] is None else str(row["fp8_saved_input"])
        sizes = " | ".join(f"{row[name]:.2f}" for name in ("one", "three", "frozen"))
        lines.append(f"| {row['recipe']} | {option} | {sizes} | {row['gradient_db']:.1f} dB |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the file and the table."""
    kept = measure()
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    page = PAGE.read_text()
    begin, end = "<!-- figures of benchmarks/results/saved_inputs.json -->\n", "<!-- end of figures -->"
    before, found, rest = page.partition(begin)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table.")
    PAGE.write_text(before + begin + table(kept) + "\n" + end + rest.partition(end)[2])
    print(table(kept))


if __name__ == "__main__":
    main()
