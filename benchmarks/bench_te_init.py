"""What FP32 master weights lose by each way of initialization, its costs, and its effect on training; JSON.

Writes results/te_init.json. Errors and changed codes are exact figures of the seeds named there; memory is that of one
process on this machine.
"""

import json
import math
import platform
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import fp8_te_init as fti
from fp8_common._machine import processor_name, usable_cores
from fp8_te_init._parameters import fp8_weights
from fp8_te_init._report import host_rss
from fp8_te_init._sources.dither import dithered

RESULT = Path(__file__).parent / "results" / "te_init.json"
SIGMAS = (0.02, 0.00144)
SIDE = 2048
SEEDS = 5
STEPS = 60
MEMORY_SIDE, MEMORY_LAYERS = 4096, 12  # 201 million weights
SOURCES = ("none", "cpu", "pinned", "residual", "replay")


def distance(values: torch.Tensor, sigma: float) -> float:
    """Return the Kolmogorov-Smirnov distance of values from N(0, sigma^2)."""
    ordered = values.double().flatten().sort().values
    expected = 0.5 * (1 + torch.erf(ordered / (sigma * math.sqrt(2))))
    low = torch.searchsorted(ordered, ordered, right=False) / ordered.numel()
    high = torch.searchsorted(ordered, ordered, right=True) / ordered.numel()
    return float(torch.maximum((high - expected).abs(), (low - expected).abs()).max())


def figures(masters: torch.Tensor, exact: torch.Tensor, sigma: float) -> dict[str, float]:
    """Return what masters lost against the float32 values that were drawn."""
    return {
        "rel_rmse": float((masters - exact).norm() / exact.norm()),
        "zeros": float((masters == 0).float().mean()),
        "ks": distance(masters, sigma),
    }


def master_errors() -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of every source at every sigma."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for sigma in SIGMAS:
        torch.manual_seed(0)
        exact = torch.randn(SIDE, SIDE) * sigma
        layer = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(exact)
        fti.convert_linear(layer, preserve="residual")
        weight = fp8_weights(layer)[0].weight
        rows = {
            "bf16 copy": layer.weight.get_high_precision_init_val().float(),
            "dequantized, amax scale": weight.values(),
            "dithered in the rounding cell": dithered(weight, seed=0, name="w"),
        }
        layer.weight.state.scale = torch.ones(())
        rows["dequantized, scale 1"] = layer.weight.state.quantized(exact).view(torch.float8_e4m3fn).float()
        table[str(sigma)] = {name: figures(values, exact, sigma) for name, values in rows.items()}
    return table


class Net(nn.Module):
    """A small network whose linear layers hold all that is trained."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, width]."""
        for layer in self.layers:
            x = x + layer(nn.functional.gelu(nn.functional.layer_norm(x, x.shape[-1:])))
        return x


def dead_zone_run(seed: int, source: str, lr: float) -> dict[str, list[float]]:
    """Train towards a random teacher; return losses, and the share of codes that left their first value."""
    torch.manual_seed(1000 + seed)
    teacher = Net()
    torch.manual_seed(seed)
    with fti.primary_weights(preserve="cpu"):
        model = Net()
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=lr, weight_decay=0.0)
    order = {"copy": ("copy",), "dequant": ("dequant",), "dither": ("dither",)}[source]
    fti.seed_masters(optimizer, model, strict=False, source_order=order)
    first = [layer.weight.codes.view(torch.uint8).clone() for layer in model.layers]
    total = sum(codes.numel() for codes in first)
    generator = torch.Generator().manual_seed(seed)
    losses, flipped = [], []
    for _ in range(STEPS):
        x = torch.randn(64, 96, generator=generator)
        with torch.no_grad():
            target = teacher(x)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = (layer.weight.codes.view(torch.uint8) for layer in model.layers)
        flipped.append(sum(int((a != b).sum()) for a, b in zip(now, first, strict=True)) / total)
        losses.append(loss.item())
    return {"losses": losses, "flipped": flipped}


def dead_zone() -> dict[str, dict[str, object]]:
    """Return, for a small and a usual learning rate, how runs differ from those that start from the copy."""
    table: dict[str, dict[str, object]] = {}
    for lr in (1e-5, 1e-3):
        runs = {s: [dead_zone_run(seed, s, lr) for seed in range(SEEDS)] for s in ("copy", "dequant", "dither")}
        entry: dict[str, object] = {}
        for source, group in runs.items():
            early = [
                sum(run["losses"][:30]) / 30 - sum(base["losses"][:30]) / 30
                for run, base in zip(group, runs["copy"], strict=True)
            ]
            entry[source] = {
                "flipped_after_10": band([run["flipped"][9] for run in group]),
                "flipped_after_60": band([run["flipped"][-1] for run in group]),
                "early_loss_difference": band(early),
                "loss_of_copy": sum(sum(base["losses"][:30]) / 30 for base in runs["copy"]) / SEEDS,
                "flipped": [sum(run["flipped"][i] for run in group) / SEEDS for i in range(STEPS)],
            }
        table[str(lr)] = entry
    return table


def band(values: list[float]) -> dict[str, float]:
    """Return mean and the half width of its 95 % confidence band (Student's t with 4 degrees of freedom)."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return {"mean": mean, "half_width_95": 2.776 * spread / math.sqrt(len(values))}


def built(**options: str) -> nn.Sequential:
    """Return the model whose memory is measured."""
    with fti.primary_weights(release="manual", **options):
        layers = [nn.Linear(MEMORY_SIDE, MEMORY_SIDE, bias=False, dtype=torch.bfloat16) for _ in range(MEMORY_LAYERS)]
    return nn.Sequential(*layers)


def build_and_measure(source: str) -> None:
    """Print the memory of this process for one model; run in a process of its own."""
    torch.set_num_threads(1)
    before = host_rss()
    model = built(preserve=source)
    after = host_rss()
    report = fti.memory_report(model)
    for layer in model:
        layer.weight.clear_high_precision_init_val()
    print(
        json.dumps(
            {
                "weights": report.parameters,
                "codes": report.codes,
                "copies": report.copies,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
                "after_init": after - before,
                "after_release": host_rss() - before,
            }
        )
    )


def memory() -> dict[str, dict[str, int]]:
    """Return the memory of a model of 201 million weights for every way to keep its start."""
    table = {}
    for source in SOURCES:
        command = [sys.executable, "-m", "benchmarks.bench_te_init", "--memory", source]
        table[source] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return table


def main() -> None:
    """Measure everything and write the result."""
    if sys.argv[1:2] == ["--memory"]:
        build_and_measure(sys.argv[2])
        return
    result = {
        "machine": {"processor": processor_name(), "cores": usable_cores(), "torch": torch.__version__},
        "python": platform.python_version(),
        "shape": [SIDE, SIDE],
        "memory": memory(),
        "master_errors": master_errors(),
        "dead_zone": {"seeds": SEEDS, "steps": STEPS, "runs": dead_zone()},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Wrote {RESULT.relative_to(Path.cwd())}.")


if __name__ == "__main__":
    main()
