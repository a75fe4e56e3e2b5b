"""How long is a training step under FSDP2 with FP8, what does it cost the host, and does that grow with the ranks?

    python -m benchmarks.fsdp_step [--quick] [--worlds 8 512 4096]

bfloat16, torchao (with its precomputation of scales) and fp8-torch-fsdp take turns in one process. Collectives go to a
fake process group, which has as many ranks as asked for and moves no data, so that only a rank's own work is timed; the
matmuls run on memory that was never gathered, which costs the same. Without FP8 hardware all but bfloat16 is emulated.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao import float8

from benchmarks._common import median_ratio, options, save, table, take_turns
from fp8_torch_fsdp import convert_to_float8_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")


class Contestant(NamedTuple):
    """One way to train the same model: a conversion in place, and what its users call after each step."""

    convert: Callable[[nn.Module], object]
    after_step: Callable[[nn.Module], object]


def contestants(recipes: tuple[str, ...]) -> dict[str, Contestant]:
    """Return bfloat16, torchao, and ours with some recipes."""
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    precompute = float8.precompute_float8_dynamic_scale_for_fsdp
    return {
        "bf16": Contestant(lambda model: None, lambda model: None),
        "torchao": Contestant(lambda model: float8.convert_to_float8_training(model, config=config), precompute),
        **{
            f"ours, {recipe}": Contestant(
                lambda model, recipe=recipe: convert_to_float8_training(model, recipe=recipe), lambda model: None
            )
            for recipe in recipes
        },
    }


def step_of(contestant: Contestant, layers: int, size: int, rows: int, *, compiled: bool) -> Callable[[], None]:
    """Return a training step of a stack of linear layers, each an FSDP group."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size, bias=False, device=DEVICE) for _ in range(layers)))
    contestant.convert(model)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(rows, size, device=DEVICE)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        contestant.after_step(model)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return step


def study(
    world: int,
    rounds: int,
    recipes: tuple[str, ...],
    *,
    layers: int,
    size: int,
    rows: int,
    compiled: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each contestant's steps as rank 0 of `world` ranks."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        steps = {
            name: step_of(one, layers, size, rows, compiled=compiled) for name, one in contestants(recipes).items()
        }
        for step in steps.values():
            step()
        return take_turns(steps, rounds, clock=clock)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure and write."""
    parser = options(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 512, 4096], help="numbers of ranks")
    chosen = parser.parse_args()
    rounds, size = (1, 64) if chosen.quick else (chosen.rounds, 2048)
    modes = {"eager": False} | ({"compiled": True} if DEVICE == "cuda" else {})
    recipes = RECIPES[:1] if chosen.quick else RECIPES
    long = {
        mode: study(2, rounds, recipes, layers=4, size=size, rows=size // 4, compiled=compiled)
        for mode, compiled in modes.items()
    }
    tables = []
    for mode, times in long.items():
        rows = [(f"step of 4 weights of {size} x {size}, {mode}", "milliseconds", "bf16's time / this")]
        for name, seconds in times.items():
            ratio = median_ratio(times["bf16"], seconds)
            rows.append((name, f"{1e3 * statistics.median(seconds):.1f}", f"{ratio:.2f}"))
        tables.append(table(rows))
    # small layers, and the processor time of this thread: what the host pays for hooks, casts and scales
    torch.set_num_threads(1)
    layers, worlds = (2, chosen.worlds[:1]) if chosen.quick else (24, chosen.worlds)
    settings = {"layers": layers, "size": 256, "rows": 4, "clock": time.thread_time}
    host = {world: study(world, rounds, RECIPES[:1], **settings) for world in worlds}
    rows = [("host time of a small weight and step, µs", *(f"{world} ranks" for world in host))]
    for name in next(iter(host.values())):
        cells = [1e6 * statistics.median(times[name]) / layers for times in host.values()]
        rows.append((name, *(f"{cell:.0f}" for cell in cells)))
    tables.append(table(rows))
    save(chosen.results, "fsdp_step", {"device": DEVICE, "steps": long, "host": host}, "\n\n".join(tables))


if __name__ == "__main__":
    main()
