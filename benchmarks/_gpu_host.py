"""What `benchmarks.gpu` asks about the time that the host takes in PyTorch; functions as in `_gpu_parts`."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks._gpu_parts import LLAMA, Report, gradients, graph_of, rotation
from benchmarks.modelled.models import Block, convert
from fp8_torch_fsdp import synchronize_scales

WAITS, OVERHEAD = (1, 4, 16), "reduce-overhead"
DEPTHS = 8, 24
LEAST_ISSUE = 2.5
"""The greatest time to issue an eager layer that is wanted, as a multiple of `nn.Linear`'s."""
HOST_OF_A_BLOCK = 0.9
"""The greatest time of a compiled block, in milliseconds, in which no kernel runs."""
WAITS_LITTLE = f"a compiled step waits at most {HOST_OF_A_BLOCK} ms for the host"
ISSUED = f"the host issues an eager layer in at most {LEAST_ISSUE} times nn.Linear's time"


def where_time(report: Report, contender: str) -> None:
    """Where the time of a compiled Llama block goes: runs before a wait, the host, a CUDA graph, kernels."""
    width, tokens = (4096, LLAMA) if report.on_gpu else (1024, 32)
    made = {
        "bf16": partial(step_of, report, "bf16", width, tokens, None),
        contender: partial(step_of, report, contender, width, tokens, None),
        f"{contender}, {OVERHEAD}": partial(step_of, report, contender, width, tokens, OVERHEAD),
        f"{contender}, {OVERHEAD}, FSDP2": partial(step_of, report, contender, width, tokens, OVERHEAD, sharded=True),
    }
    runs = {name: run for name, make in made.items() if (run := tried(report, name, make))}
    for repeat in WAITS if report.on_gpu else WAITS[:1]:
        report.figure(f"milliseconds, {repeat} before a wait", report.timed(runs, repeat))
    report.figure("until it is issued", {name: report.issued(run, 1) for name, run in runs.items()})
    if report.on_gpu:
        graphs = {
            name: tried(report, f"{name}, captured", partial(graph_of, runs[name])) for name in ("bf16", contender)
        }
        captured = {name: run for name, run in graphs.items() if run}
        report.figure("milliseconds of a CUDA graph", report.timed(captured, 4) if captured else {})
    # 16 runs before a wait: what the host hides behind kernels is hidden
    took = report.found["figures"][f"milliseconds, {WAITS[-1] if report.on_gpu else 1} before a wait"][contender]
    kernels = kernel_milliseconds(report, runs[contender])
    report.claim(WAITS_LITTLE, took - kernels <= HOST_OF_A_BLOCK, f"{took:.2f} ms, kernels {kernels:.2f} ms")


def step_of(
    report: Report, who: str, width: int, tokens: int, mode: str | None, *, sharded: bool = False
) -> Callable[[], object]:
    """Return a compiled forward and backward, which ran twice; `sharded` by FSDP2 on this one rank."""
    torch.manual_seed(0)
    with torch.device(report.device):
        model = Block(width).bfloat16()
    for weight in model.parameters():
        nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.02)
    convert(model, who, "eager" if sharded else "compiled")
    if sharded:
        if not dist.is_initialized():
            backend = "nccl" if report.on_gpu else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(model, mesh=init_device_mesh(torch.device(report.device).type, (1,)))
    options: dict[str, Any] = {"mode": mode, "backend": "inductor"} if report.on_gpu else {"backend": "aot_eager"}
    forward = model.forward

    def own(*given: torch.Tensor) -> torch.Tensor:
        return forward(*given)

    # compiled programs are kept by the code object: guards of other contenders would be asked first in every call
    own.__code__ = own.__code__.replace(co_name=f"forward_of_{id(model)}")
    model.forward = torch.compile(own, fullgraph=True, **options)  # hooks of the root run outside
    x = torch.randn(1, tokens, width, device=report.device, dtype=torch.bfloat16, requires_grad=True)
    given = (x, *rotation(report, tokens))
    run = partial(gradients, model, given, torch.randn_like(x))

    def begun() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return run()

    chosen = begun if mode else run
    for _ in range(2):
        chosen()
    return chosen


def kernel_milliseconds(report: Report, run: Callable[[], object]) -> float:
    """Return the time of all kernels of a run; of all operators without a GPU."""
    kind = torch.profiler.ProfilerActivity.CUDA if report.on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        run()
    events = profile.key_averages()
    return 1e-3 * sum(e.self_device_time_total if report.on_gpu else e.self_cpu_time_total for e in events)


def issue(report: Report, contender: str) -> None:
    """The host's time for an eager layer, forward and backward: the difference of two depths, without what roots do."""
    size, rows = (512, 256) if report.on_gpu else (32, 32)
    runs = {(who, depth): layers_of(report, who, depth, size, rows) for who in ("bf16", contender) for depth in DEPTHS}
    found: dict[Any, list[float]] = {key: [] for key in runs}
    with report.alone():
        for _ in range(25 if report.on_gpu else 3):
            for key, run in runs.items():
                if report.on_gpu:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                found[key].append(1e6 * (time.perf_counter() - start))
    per_layer = of_a_layer({key: statistics.median(each) for key, each in found.items()}, contender)
    report.figure("microseconds until a layer is issued", per_layer)
    ratio = per_layer[contender] / per_layer["bf16"]
    report.claim(ISSUED, ratio <= LEAST_ISSUE, f"{ratio:.2f} times, {per_layer[contender]:.0f} microseconds")


def of_a_layer(times: Mapping[tuple[str, int], float], contender: str) -> dict[str, float]:
    """Return what one layer adds."""
    few, many = DEPTHS
    return {who: (times[who, many] - times[who, few]) / (many - few) for who in ("bf16", contender)}


def layers_of(report: Report, who: str, depth: int, size: int, rows: int) -> Callable[[], object]:
    """Return a forward and a backward of so many layers, with settled scales."""
    torch.manual_seed(0)
    made = [nn.Linear(size, size, bias=False, device=report.device, dtype=torch.bfloat16) for _ in range(depth)]
    model = nn.Sequential(*made)
    convert(model, who, "eager")
    x, grad = (torch.randn(rows, size, device=report.device, dtype=torch.bfloat16) for _ in range(2))
    run = partial(gradients, model, (x.requires_grad_(),), grad)
    for _ in range(3):
        run()
        if "delayed" in who:
            synchronize_scales(model)
    return run


def tried(report: Report, name: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns; None, and its failure in the report, where it raises."""
    try:
        return make()
    except Exception as error:
        report.found["failures"][name] = repr(error)
        report.write()
        return None
