"""What is FP8 worth on a slow link, measured?

    python -m benchmarks.links [--quick] [--rates 100 400 0] [--ranks 2]

Ranks on this machine train a stack of feed-forward blocks under FSDP2 over gloo, in a network namespace of their own
(Linux with `unshare` and `tc`; no rights are needed). All of them send over its loopback, which carries their number
times the rate, so that each can send at that rate; 0 is no limit. bf16 layers on bf16 communication, with gathers,
gradients and both in FP8, and FP8 layers take turns. Without a GPU the matmuls of FP8 layers are emulated on a CPU, so
what is saved is bytes alone; layers multiply few rows, so that the link and not the CPU decides. Bytes are those of the
loopback: gloo reduces and scatters bf16 gradients by an all-reduce, which sends them twice.
"""

import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks._common import median_ratio, options, save, table, take_turns
from examples._report import leave
from fp8_common import GradientCompression
from fp8_common.advise import Accelerator, Choice, Job, Links, ModelShape, estimate
from fp8_torch_fsdp import compress_communication, convert_to_float8_training

RATES, RANKS = (100, 200, 400, 1000, 2000, 0), (2, 4)
"""Mbit/s that each rank can send; numbers of ranks."""
WIDTH, LAYERS, ROWS = 512, 4, 32


class Kind(NamedTuple):
    """Whether layers are FP8 ones, what of others and of gradients travels in FP8, and how gradients are rounded."""

    converted: bool = False
    weights: bool = False
    gradients: bool = False
    rounding: str = "stochastic"


BF16 = "bf16"
KINDS = {
    BF16: Kind(),
    "gathers FP8": Kind(weights=True),
    "gradients FP8": Kind(gradients=True),
    "both FP8": Kind(weights=True, gradients=True),
    "both FP8, nearest": Kind(weights=True, gradients=True, rounding="nearest"),
    "FP8 layers": Kind(converted=True),
    "FP8 layers, gradients FP8": Kind(converted=True, gradients=True),
}
UNLIMITED = 'ip link set lo up && exec "$0" -m torch.distributed.run --master-addr 127.0.0.1 --nproc-per-node {ranks} '
UNLIMITED += '-m benchmarks.links "$@"'
LIMITED = "tc qdisc add dev lo root tbf rate {total}mbit burst 256kb latency 400ms && " + UNLIMITED


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, width] for the same."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def step_of(kind: Kind, width: int) -> Callable[[], None]:
    """Return a training step, after which all ranks have arrived."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
    if kind.converted:
        convert_to_float8_training(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if kind.weights or kind.gradients:
        gradients = GradientCompression(rounding=kind.rounding) if kind.gradients else False
        compress_communication(model, weights=kind.weights, gradients=gradients)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(ROWS, width)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return step


def sent() -> int:
    """Return the bytes that have crossed the loopback of this namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def bytes_of(step: Callable[[], None]) -> int:
    """Return the bytes of one step of all ranks; the step runs twice."""
    step()
    before = sent()
    step()
    return sent() - before


def on_a_rank(width: int, rounds: int, result: Path) -> None:
    """Time the steps; the first rank writes their seconds and bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {name: step_of(kind, width) for name, kind in KINDS.items()}
    nbytes = {name: bytes_of(step) for name, step in steps.items()}
    found = {"seconds": take_turns(steps, rounds), "bytes": nbytes}
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    leave()


def measured(rate: int, ranks: int, width: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return seconds and bytes of the steps of each kind where each of `ranks` can send `rate` Mbit/s.

    Raises:
        RuntimeError: The namespace, its limit or a rank failed.
    """
    result = folder / f"links-{ranks}-{rate}.json"
    given = [f"--width={width}", f"--rounds={rounds}", f"--rank-result={result}"]
    command = (LIMITED if rate else UNLIMITED).format(total=rate * ranks, ranks=ranks)
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", command, sys.executable, *given], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"At {rate} Mbit/s: {done.stderr[-2000:]}")
    found = json.loads(result.read_text())
    result.unlink()
    return {"ranks": ranks, "rate": rate, **found}


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as fast as bf16 each kind is."""
    return {name: median_ratio(row["seconds"][BF16], row["seconds"][name]) for name in KINDS}


def advised(row: Mapping[str, Any], width: int) -> dict[str, float]:
    """Return how many times as fast as bf16 `fp8 advise` makes the kinds without FP8 layers.

    The time of bf16 is measured, what a kind saves of it follows from the rate. Gradients in bf16 count twice.
    """
    link, block, base = row["rate"] * 1e6 / 8, 8 * width**2, statistics.median(row["seconds"][BF16])
    endless = Accelerator(1e18, 1e18, 1e18, 1e18)  # what the link does not explain is in the time of bf16
    shape = ModelShape(blocks=LAYERS, width=width, weights=block, active=block)
    job = Job(shape=shape, ranks=row["ranks"], tokens=ROWS, accelerator=endless, links=Links(link, link, 0.0))

    def seconds(kind: Kind) -> float:
        gather, reduce = 1 + 1 / 32 if kind.weights else 2.0, 1 + 4 / 128 if kind.gradients else 2 * 2.0
        return estimate(job, Choice("", weight_bytes=gather, gradient_bytes=reduce)).seconds

    plain = {name: kind for name, kind in KINDS.items() if not kind.converted}
    return {name: base / (base + seconds(kind) - seconds(Kind())) for name, kind in plain.items()}


def break_even(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return the Mbit/s at which a kind is as fast as bf16, by its logarithm between two rates; None if none is."""
    points = sorted((row["rate"] or math.inf, ratios(row)[name]) for row in rows)
    for (low, above), (high, below) in itertools.pairwise(points):
        if above >= 1 > below:
            return low if math.isinf(high) else low * (high / low) ** ((above - 1) / (above - below))
    return None


def main() -> None:
    """Measure every rate and write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="Mbit/s; 0 is no limit")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks")
    parser.add_argument("--width", type=int, default=WIDTH, help="features of a block")
    parser.add_argument("--rank-result", type=Path, help="for the ranks that this program starts")
    chosen = parser.parse_args()
    if chosen.rank_result:
        on_a_rank(chosen.width, chosen.rounds, chosen.rank_result)
    if missing := [name for name in ("unshare", "ip", "tc") if not shutil.which(name)]:
        sys.exit(f"{', '.join(missing)} is not here: a link cannot be limited on this machine.")
    if chosen.quick:
        chosen.rates, chosen.ranks, chosen.width, chosen.rounds = [2000], [2], 64, 1
    chosen.results.mkdir(parents=True, exist_ok=True)
    rows = [
        measured(rate, ranks, chosen.width, chosen.rounds, chosen.results)
        for ranks in chosen.ranks
        for rate in chosen.rates
    ]
    parameters = LAYERS * 8 * chosen.width**2
    lines: list[tuple[Any, ...]] = [(f"step of {parameters:,} parameters", *KINDS)]
    for ranks in chosen.ranks:
        own = [row for row in rows if row["ranks"] == ranks]
        for row in own:
            row["advised"] = advised(row, chosen.width) if row["rate"] else {}
            cells = [f"{statistics.median(row['seconds'][BF16]):.2f} s"]
            for name, ratio in ratios(row).items():
                told = f" ({row['advised'][name]:.2f}x)" if name in row["advised"] else ""
                cells += [f"{ratio:.2f}x{told}"] if name != BF16 else []
            lines.append((f"{ranks} ranks, {row['rate'] or 'no limit'}{' Mbit/s' * bool(row['rate'])}", *cells))
        nbytes = own[0]["bytes"]
        per_rank = f"{nbytes[BF16] / ranks / 1e6:.1f} MB"
        limits = (f"{nbytes[BF16] / nbytes[name]:.2f}x" for name in KINDS if name != BF16)
        lines.append((f"{ranks} ranks, bytes sent by each", per_rank, *limits))
        evens = {name: break_even(own, name) for name in KINDS if name != BF16}
        lines.append((f"{ranks} ranks, break-even", "", *(f"{e:.0f} Mbit/s" if e else "-" for e in evens.values())))
    save(chosen.results, "links", {"parameters": parameters, "rows": rows}, table(lines))


if __name__ == "__main__":
    main()
