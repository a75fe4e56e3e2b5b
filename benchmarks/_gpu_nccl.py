"""What `benchmarks.gpu` asks of two GPUs: bytes, bits and steps under NCCL; functions as in `_gpu_parts`.

Two ranks, on a GPU each, train with FSDP2 under NCCL and again over gloo. The sum of two numbers has one order, so all
bits must be equal. Without a GPU both run over gloo.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp
from benchmarks._gpu_parts import FASTER, Report
from tests.helpers.collectives import CollectiveCounter

RANKS, STEPS, BATCH = 2, 3, 32
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
GRADIENTS = "tensorwise, FP8 gradients"
"""Gradients travel as codes, too."""
SETUPS = (*RECIPES, GRADIENTS)

COLLECTIVES = "two ranks gather all 256 bytes and agree on the largest amax, bit for bit"
ONE_BYTE = "weights travel in one byte"
FORWARD = "a sharded forward is that of one process, bit for bit"
TRAINED = f"{STEPS} steps under NCCL are those over gloo, bit for bit"


def claims() -> Iterator[str]:
    """Yield all claims of the part."""
    yield COLLECTIVES
    for setup in SETUPS:
        yield from (f"{setup}: {claim}" for claim in (ONE_BYTE, FORWARD, TRAINED, FASTER))


def nccl(report: Report, _: str) -> None:
    """Bytes, bits and a step of FSDP2 under NCCL, on two GPUs."""
    found = torch.cuda.device_count() if report.on_gpu else RANKS
    if found < RANKS:
        report.found["missing"] = f"needs {RANKS} GPUs, this machine has {found}"
        report.write()
        return
    output = report.path.with_suffix(".rank")
    given = str(report.path.with_suffix(".store")), str(output), report.on_gpu
    started = torch.multiprocessing.spawn(rank, given, nprocs=RANKS, join=False)
    done = False
    while not done:
        try:
            done = started.join(timeout=1)
        finally:  # what was found before a rank failed stays
            lines = output.read_text().splitlines() if output.exists() else []
            for kind, name, value in map(json.loads, lines):
                report.found[kind][name] = value
            report.write()


class Sizes(NamedTuple):
    """Of a model: linear layers, their width, and rows of a batch."""

    layers: int
    width: int
    rows: int


def rank(number: int, store: str, output: str, on_gpu: bool) -> None:
    """Run one rank, whose first writes what it finds to `output`, one JSON line for each."""
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend, limit = ("nccl" if on_gpu else "gloo"), timedelta(seconds=120)
    dist.init_process_group(backend, f"file://{store}", rank=number, world_size=RANKS, timeout=limit)
    default = DeviceMesh.from_group(dist.group.WORLD, device.type)
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), device.type)

    def tell(kind: str, name: str, value: Any) -> None:
        if number == 0:
            with Path(output).open("a") as file:
                file.write(json.dumps((kind, name, value)) + "\n")

    def claim(text: str, holds: bool, shown: str) -> None:
        everywhere = torch.tensor(int(holds), device=device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        tell("claims", text, {"holds": bool(everywhere), "shown": shown})

    claim(COLLECTIVES, collectives(device, number), f"{backend}, {RANKS} ranks")
    small, large = (Sizes(3, 512, 128), Sizes(8, 4096, 8192)) if on_gpu else (Sizes(3, 64, 32), Sizes(2, 64, 32))
    for setup in SETUPS:
        one, nbytes, outputs = train(setup, default, device, small)
        claim(f"{setup}: {ONE_BYTE}", nbytes == 2.0, f"{nbytes:.3f} bytes for each weight, gathered twice a step")
        alone = build(setup, None, device, small)
        with torch.no_grad():
            same = torch.equal(outputs, alone(batch(number, 0, device, small)))
        claim(f"{setup}: {FORWARD}", same, f"{small.width} x {small.width}, {small.layers} layers")
        other, _, _ = train(setup, gloo, device, small)
        pairs = list(zip(one, other, strict=True))
        shown = f"{sum(torch.equal(a, b) for a, b in pairs)} of {len(pairs)} shards equal"
        claim(f"{setup}: {TRAINED}", all(torch.equal(a, b) for a, b in pairs), shown)
    for setup in SETUPS:
        runs = {who: stepper(who, default, device, large, number) for who in ("bf16", setup)}
        times = timed(runs, device)
        tell("figures", f"{setup}: milliseconds of a step", times)
        claim(f"{setup}: {FASTER}", times[setup] < times["bf16"], shown_ratio(times, setup))
    dist.destroy_process_group()


def shown_ratio(times: dict[str, float], setup: str) -> str:
    """Return the speed-up and the time as `benchmarks.gpu` reads them."""
    return f"{times['bf16'] / times[setup]:.3f}x, {times[setup]:.2f} ms"


def collectives(device: torch.device, number: int) -> bool:
    """Return whether every byte is gathered as it is, and the largest amax bits, NaN's too, are those of all ranks."""
    codes = torch.arange(256, device=device).to(torch.uint8).roll(number)
    gathered = torch.empty(RANKS * 256, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, codes)
    expected = torch.cat([torch.arange(256, device=device).to(torch.uint8).roll(one) for one in range(RANKS)])
    amax = torch.tensor([1.0, 2.0, 2.0**-149, float("inf")], device=device)
    own = amax.roll(number)
    own[3] = float("nan") if number == 0 else own[3]
    bits = own.view(torch.int32).clone()
    dist.all_reduce(bits, op=dist.ReduceOp.MAX)
    rows = [amax.roll(one) for one in range(RANKS)]
    rows[0][3] = float("nan")
    return torch.equal(gathered, expected) and torch.equal(
        bits, torch.stack([row.view(torch.int32) for row in rows]).amax(0)
    )


def build(setup: str, mesh: DeviceMesh | None, device: torch.device, sizes: Sizes) -> nn.Module:
    """Return a model on one device, sharded over a mesh if there is one."""
    torch.manual_seed(0)
    layers = [nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)]
    model = nn.Sequential(*layers).to(device).bfloat16()
    if setup != "bf16":
        fp8_torch_fsdp.convert_to_float8_training(model, recipe=setup.partition(",")[0])
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if setup == GRADIENTS:
            fp8_torch_fsdp.compress_communication(model, weights=False, gradients=True)
    return model


def batch(number: int, step: int, device: torch.device, sizes: Sizes) -> torch.Tensor:
    """Return bfloat16 [rows, width], others on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    return torch.randn(sizes.rows, sizes.width, generator=generator).to(device, torch.bfloat16)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return the output."""
    y = model(x)
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def train(
    setup: str, mesh: DeviceMesh, device: torch.device, sizes: Sizes
) -> tuple[list[torch.Tensor], float, torch.Tensor]:
    """Return this rank's shards after some steps, bytes gathered per weight in the last, and the first output."""
    model, number = build(setup, mesh, device, sizes), dist.get_rank()
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        with CollectiveCounter() as counter:
            outputs.append(one_step(model, optimizer, batch(number, step, device, sizes)))
    nbytes = sum(one.nbytes for one in counter.of("all_gather") if one.elements >= sizes.width)
    elements = sum(parameter.numel() for parameter in model.parameters()) / RANKS
    shards: list[Any] = [parameter.data.to_local() for parameter in model.parameters()]
    return [getattr(shard, "plain", shard).clone() for shard in shards], nbytes / elements, outputs[0]


def stepper(setup: str, mesh: DeviceMesh, device: torch.device, sizes: Sizes, number: int) -> Callable[[], object]:
    """Return a training step."""
    model = build(setup, mesh, device, sizes)
    return partial(one_step, model, torch.optim.SGD(model.parameters(), lr=1e-4), batch(number, 0, device, sizes))


def timed(runs: dict[str, Callable[[], object]], device: torch.device, turns: int = 10) -> dict[str, float]:
    """Return the median milliseconds of each run on the slowest rank; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    on_gpu = device.type == "cuda"
    for turn in range((turns if on_gpu else 1) + 2):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            times[name] += [time.perf_counter() - start] if turn >= 2 else []
    found = torch.tensor([1e3 * statistics.median(own) for own in times.values()], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(runs, found.tolist(), strict=True))
