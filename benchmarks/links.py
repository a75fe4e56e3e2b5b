"""What is FP8 worth on a slow link, measured?

    python -m benchmarks.links [--quick] [--rates 100 400 1600]

Two ranks on this machine train a stack of feed-forward blocks under FSDP2 over gloo, in a network namespace of their
own whose loopback is limited to some Mbit/s (Linux with `unshare` and `tc`; no rights are needed). bfloat16 gathers and
gradients, FP8 gathers, and FP8 gathers and gradients take turns. Without a GPU the matmuls are emulated on a CPU, so
what is saved is bytes alone; layers multiply few rows, so that the link and not the CPU decides.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks._common import median_ratio, options, save, table, take_turns
from examples._report import leave
from fp8_torch_fsdp import compress_gradients, convert_to_float8_training

RATES = (100, 400, 1600)
"""Mbit/s."""
WIDTH, LAYERS, ROWS, RANKS = 512, 4, 32, 2
KINDS = ("bf16", "FP8 gathers", "FP8 gathers and gradients")
LIMITED = (
    "ip link set lo up && tc qdisc add dev lo root tbf rate {rate}mbit burst 256kb latency 400ms && "
    'exec "$0" -m torch.distributed.run --master-addr 127.0.0.1 --nproc-per-node {ranks} -m benchmarks.links "$@"'
)


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, width] for the same."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def step_of(kind: str, width: int) -> Callable[[], None]:
    """Return a training step, after which all ranks have arrived."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
    if kind != "bf16":
        convert_to_float8_training(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if kind == KINDS[-1]:
        compress_gradients(model)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(ROWS, width)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return step


def on_a_rank(width: int, rounds: int, result: Path) -> None:
    """Time the steps; the first rank writes their seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = take_turns({kind: step_of(kind, width) for kind in KINDS}, rounds)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(times))
    dist.barrier()
    leave()


def measured(rate: int, width: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of the steps of each kind on a link of `rate` Mbit/s.

    Raises:
        RuntimeError: The namespace, its limit or a rank failed.
    """
    result = folder / f"links-{rate}.json"
    given = [f"--width={width}", f"--rounds={rounds}", f"--rank-result={result}"]
    shell = ["sh", "-c", LIMITED.format(rate=rate, ranks=RANKS), sys.executable, *given]
    done = subprocess.run(["unshare", "-rn", *shell], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"At {rate} Mbit/s: {done.stderr[-2000:]}")
    times = json.loads(result.read_text())
    result.unlink()
    return times


def main() -> None:
    """Measure every rate and write."""
    parser = options(__doc__, rounds=9)
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="Mbit/s")
    parser.add_argument("--width", type=int, default=WIDTH, help="features of a block")
    parser.add_argument("--rank-result", type=Path, help="for the ranks that this program starts")
    chosen = parser.parse_args()
    if chosen.rank_result:
        on_a_rank(chosen.width, chosen.rounds, chosen.rank_result)
    if missing := [name for name in ("unshare", "ip", "tc") if not shutil.which(name)]:
        sys.exit(f"{', '.join(missing)} is not here: a link cannot be limited on this machine.")
    if chosen.quick:
        chosen.rates, chosen.width, chosen.rounds = [1600], 64, 1
    chosen.results.mkdir(parents=True, exist_ok=True)
    times = {rate: measured(rate, chosen.width, chosen.rounds, chosen.results) for rate in chosen.rates}
    parameters = LAYERS * 8 * chosen.width**2
    rows: list[tuple[Any, ...]] = [(f"step of {parameters:,} parameters, {RANKS} ranks", *KINDS)]
    for rate, kinds in times.items():
        cells = [f"{statistics.median(kinds['bf16']):.2f} s"]
        cells += [f"{median_ratio(kinds['bf16'], kinds[kind]):.2f}x as fast" for kind in KINDS[1:]]
        rows.append((f"{rate} Mbit/s", *cells))
    save(chosen.results, "links", {"parameters": parameters, "seconds": times}, table(rows))


if __name__ == "__main__":
    main()
