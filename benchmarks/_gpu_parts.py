"""What `benchmarks.gpu` asks a GPU, a function a question, each called with a `Report` in a process of its own."""

import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import ROOT
from benchmarks._common import RESULTS, machine, take_turns
from benchmarks.modelled.models import Block, convert
from benchmarks.modelled.moe import Experts
from benchmarks.modelled.prices import GPUS
from fp8_torch_fsdp import synchronize_scales

MESSAGE = 3000
"""Characters of a failure that are kept, its last ones."""
LLAMA, TE = 8192, 15_872
SHAPES = {
    **{f"Llama-3-8B {k} -> {n}": (LLAMA, k, n) for k, n in ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))},
    **{f"TE {k} -> {n}": (TE, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))},
}
"""Tokens, in_features and out_features: of Llama-3-8B, and of the table that TransformerEngine publishes."""
TESTS = {
    "layers": "packages/fp8-torch-fsdp/tests/gpu/test_layers_on_gpu.py",
    "experts": "packages/fp8-torch-fsdp/tests/gpu/test_experts_on_gpu.py",
    "kernels": "shared-kernels/tests/gpu",
    "te-init": "packages/fp8-te-init/tests/gpu/test_native_on_gpu.py",
    "JAX": "packages/fp8-jax-owg/tests/gpu/test_dots_on_gpu.py",
    "TransformerEngine": "packages/fp8-te-init/tests/test_te_real.py",
}
NEEDS = {"JAX": "jax", "TransformerEngine": "transformer_engine"}
"""What tests need that need not be there."""
INTERPRETED = "shared-kernels/tests/interpreter/test_scale_kernels.py"
"""What stands for the tests of kernels where there is no GPU."""
STREAMED = {"amax", "cast", "tensorwise", "cast + transpose", "row-wise", "1x128", "128x128", "mx"}
LEAST_OF_COPY, LEAST_OF_MODEL = 0.9, 0.9


# ---------------------------------------------------------------- what a part finds


class Report:
    """What a part found: figures, failures, and for each claim whether it holds. It is in its file at once."""

    def __init__(self, path: Path, *, on_gpu: bool) -> None:
        self.path, self.device, self.on_gpu = path, "cuda" if on_gpu else "cpu", on_gpu
        self.found: dict[str, Any] = {"claims": {}, "figures": {}, "failures": {}}
        # who prepares shares the lock, and who measures has it alone: so it waits for all that prepare
        self._lock = os.open(path.with_name("lock"), os.O_CREAT | os.O_WRONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def claim(self, text: str, holds: bool, shown: str) -> None:
        """Say whether a claim holds, and what shows it."""
        self.found["claims"][text] = {"holds": holds, "shown": shown}
        self.write()

    def figure(self, name: str, value: Any) -> None:
        """Add what was measured."""
        self.found["figures"][name] = value
        self.write()

    def write(self) -> None:
        """Write all of it; who is killed meanwhile leaves the file as it was."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1))
        new.replace(self.path)

    def unlock(self) -> None:
        """Let others measure: this process only waits for them."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process measures or prepares, and let none begin."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        yield
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def timed(
        self, runs: Mapping[str, Callable[[], object]], repeat: int = 4, *, replayed: bool = False
    ) -> dict[str, float]:
        """Return the median milliseconds of each run; they take turns, while no other process measures or prepares.

        A run is repeated before the host waits, so that the device need not wait for the host, as in long models.
        `replayed` leaves out the time of the host altogether, by a CUDA graph.
        """

        def finished(run: Callable[[], object]) -> None:
            for _ in range(repeat if self.on_gpu else 1):
                run()
            if self.on_gpu:
                torch.cuda.synchronize()

        if replayed and self.on_gpu:
            runs = {name: graph_of(run) for name, run in runs.items()}
        for run in runs.values():
            finished(run)
        with self.alone():
            times = take_turns({name: partial(finished, run) for name, run in runs.items()}, 10 if self.on_gpu else 1)
        return {
            name: 1e3 * statistics.median(seconds) / (repeat if self.on_gpu else 1) for name, seconds in times.items()
        }

    def issued(self, run: Callable[[], object], repeat: int = 10) -> float:
        """Return the milliseconds that the host takes for a run, whose end it does not wait for."""
        if self.on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        return 1e3 * (time.perf_counter() - start) / repeat


# ---------------------------------------------------------------- the parts


def rates(report: Report, _: str) -> None:
    """Versions, and what large matmuls, attention and a copy reach: every modelled time rests on these rates."""
    from fp8_common.torch import casts
    from fp8_common.torch_layers.linear.config import LinearConfig
    from fp8_common.torch_layers.linear.matmul import MatmulOptions, matmul
    from fp8_common.torch_layers.linear.operand import quantize_operand

    report.figure("versions", versions(report.on_gpu))
    n, head = (8192, 128) if report.on_gpu else (256, 32)
    a, b = (torch.randn(n, n, device=report.device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(1, n // head, n, head, device=report.device, dtype=torch.bfloat16)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: torch.empty_like(source).copy_(source),
        "bf16": lambda: a @ b.t(),
        "attention": lambda: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    source = torch.zeros((1 << 30) if report.on_gpu else 1 << 20, dtype=torch.uint8, device=report.device)
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        config = LinearConfig(recipe=recipe)
        x, weight = quantize_operand(a, config.input), config.weight
        block = {"tensorwise": None, "rowwise": (1, 0)}.get(weight.granularity, (128, 128))
        w = casts.quantize_dynamic(b, weight.fp8_format, weight.policy, block)
        for fast in (False, True) if recipe != "blockwise" else (False,):
            how = MatmulOptions(torch.bfloat16, emulate=not report.on_gpu, use_fast_accum=fast)
            runs[f"fp8 {recipe}, {'fast' if fast else 'full'} accumulation"] = partial(matmul, x, w, how)
    times = report.timed(runs)
    work = {"copy": 2 * source.numel(), "attention": 2 * n * n * n}
    reached = {name: work.get(name, 2 * n**3) / (1e-3 * ms) for name, ms in times.items()}
    report.figure("per second", {name: f"{rate:.4g}" for name, rate in reached.items()})
    gpu = GPUS.get(modelled_gpu(report.on_gpu) or "")
    for name, rate in reached.items() if gpu else ():
        wanted = gpu.bandwidth if name == "copy" else gpu.flops[name.partition(" ")[0]]
        report.claim(RATES[name], rate >= LEAST_OF_MODEL * wanted, f"{rate / 1e12:.4g} T/s, taken {wanted / 1e12:.4g}")


RATES = {
    name: f"{name} reaches {LEAST_OF_MODEL:.0%} of the rate that modelled times take"
    for name in (
        *("copy", "bf16", "attention", "fp8 blockwise, full accumulation"),
        *(f"fp8 {scales}, {how} accumulation" for scales in ("tensorwise", "rowwise") for how in ("full", "fast")),
    )
}
"""The claim about each rate."""


def tests(report: Report, words: str) -> None:
    """GPU tests of the files named by `words`, in this order; after each second what is known is written."""
    names, _, chosen = words.partition(" -k ")
    files = {name: place_of(report, name) for name in names.split()}
    record = report.path.with_suffix(".jsonl")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu" if report.on_gpu else "not gpu", "-k", chosen]
    command += ["-p", "benchmarks._gpu_record", "--record", str(record), "-p", "no:cacheprovider"]
    command += ["-o", "filterwarnings=default", "-o", "timeout=300"]
    parallel = report.on_gpu and importlib.util.find_spec("xdist") is not None
    # a CUDA error ends the process that it happens in: of xdist's there are others, else each file has one
    for given in [[*files.values()]] if parallel else [[file] for file in files.values()]:
        workers = ["-n", str(max(2, min(8, (os.cpu_count() or 2) // 2)))] if parallel else []
        interpreted = {"TRITON_INTERPRET": "1"} if given == [INTERPRETED] else {}
        process = subprocess.Popen([*command, *workers, *given], cwd=ROOT, env={**os.environ, **interpreted})
        while process.poll() is None:
            time.sleep(1)
            counted(report, files, record)
        counted(report, files, record)


def place_of(report: Report, name: str) -> str:
    """Return the file or folder of tests of this name."""
    return INTERPRETED if name == "kernels" and not report.on_gpu else TESTS[name]


def counted(report: Report, files: Mapping[str, str], record: Path) -> None:
    """Put into a report what the record of the tests of some files says so far."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for name, place in files.items():
        own = {line["test"]: line for line in lines if line["test"].startswith(place)}
        failed = {test: line.get("message", "") for test, line in own.items() if line["outcome"] == "failed"}
        passed = sum(line["outcome"] == "passed" for line in own.values())
        report.found["failures"] |= failed
        report.found["figures"] |= {test: line["noted"] for test, line in own.items() if line.get("noted")}
        if passed or failed:
            report.claim(f"{name}: {EVERY_TEST}", not failed, f"{passed} passed, {len(failed)} failed")


def layer(report: Report, contender: str) -> None:
    """A linear layer, eager, forward and backward, beside bfloat16 in turns."""
    total = {"bf16": 0.0, contender: 0.0}
    for name, (rows, k, n) in SHAPES.items() if report.on_gpu else (("small", (64, 32, 48)),):
        x, grad = (torch.randn(rows, size, device=report.device, dtype=torch.bfloat16) for size in (k, n))
        runs = {}
        for who in total:
            model = nn.Sequential(nn.Linear(k, n, bias=False, device=report.device, dtype=torch.bfloat16))
            convert(model, who, "eager")
            runs[who] = partial(gradients, model, (x.requires_grad_(),), grad)
            if "delayed" in who:
                # in a first step scales are not known before the operands are
                for _ in range(2):
                    runs[who]()
                    synchronize_scales(model)
        times = report.timed(runs)
        report.figure(name, {who: round(ms, 4) for who, ms in times.items()})
        report.figure(f"{name}, until it is issued", {who: round(report.issued(run), 4) for who, run in runs.items()})
        total = {who: total[who] + ms for who, ms in times.items()}
    speedup(report, total, contender)


def block(report: Report, contender: str) -> None:
    """A Llama block, compiled, forward and backward, beside bfloat16 in turns; and the longest kernels of one step."""
    width, tokens = (4096, LLAMA) if report.on_gpu else (1024, 32)
    took = compiled(report, contender, lambda: Block(width), (1, tokens, width), rotation(report, tokens))
    if wanted := modelled(report, contender):
        report.claim(MODELLED, took <= wanted / LEAST_OF_MODEL, f"{took:.2f} ms, modelled {wanted:.2f} ms")


def experts(report: Report, argument: str) -> None:
    """Experts with row-wise scales, compiled, beside bfloat16 in turns: "EXPERTS WIDTH HIDDEN ROWS"."""
    count, width, hidden, rows = map(int, argument.split()) if report.on_gpu else (4, 64, 32, 96)
    cuts = torch.randperm(rows, device=report.device)[: count - 1].sort().values
    offsets = torch.cat([cuts, cuts.new_full((1,), rows)]).int()
    compiled(report, "ours-rowwise", lambda: Experts(width, hidden, count), (rows, width), (offsets,))


def compiled(
    report: Report, contender: str, make: Callable[[], nn.Module], shape: tuple[int, ...], others: tuple
) -> float:
    """Compile a model twice, in bfloat16 and converted, time a forward and a backward of each; return milliseconds."""
    x = torch.randn(shape, device=report.device, dtype=torch.bfloat16, requires_grad=True)
    runs = {}
    for who in ("bf16", contender):
        torch.manual_seed(0)
        with torch.device(report.device):
            model = make().bfloat16()
        for weight in model.parameters():
            nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.02)
        convert(model, who, "compiled")
        call = torch.compile(model, fullgraph=True, backend="inductor" if report.on_gpu else "aot_eager")
        runs[who] = partial(gradients, call, (x, *others), torch.randn_like(x), model)
    times = report.timed(runs)
    report.claim(COMPILES, True, "forward and backward")
    report.figure("milliseconds", times)
    speedup(report, times, contender)
    kind = torch.profiler.ProfilerActivity.CUDA if report.on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        runs[contender]()
    spent = [
        (e.self_device_time_total if report.on_gpu else e.self_cpu_time_total, e.key) for e in profile.key_averages()
    ]
    report.figure("microseconds of all kernels", round(sum(us for us, _ in spent), 1))
    # as a list: shortened names may be equal
    report.figure("longest kernels, microseconds", [(round(us, 1), name[:120]) for us, name in sorted(spent)[:-21:-1]])
    return times[contender]


MODELLED = f"takes no longer than the model says, by {1 / LEAST_OF_MODEL - 1:.0%}"


def together(report: Report, words: str) -> None:
    """Ask "MODULE:FUNCTION: ARGUMENT / ARGUMENT": a process for each, at once, which measure in turns."""
    report.unlock()
    name, _, given = words.partition(": ")
    running, logs = {}, {}
    for number, argument in enumerate(given.split(" / ")):
        output = report.path.with_suffix(f".{number}.json")
        logs[argument] = output.with_suffix(".log")
        command = [*command_of(name, output, report.on_gpu), "--argument", argument]
        with logs[argument].open("wb") as said:
            process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        running[argument] = process, output
    while True:
        states = {argument: process.poll() for argument, (process, _) in running.items()}
        for argument, (_, output) in running.items():
            found = json.loads(output.read_text()) if output.exists() else {"claims": {}, "figures": {}, "failures": {}}
            if states[argument]:
                found["failures"]["it ended"] = logs[argument].read_text(errors="replace")[-MESSAGE:]
            for kind, each in found.items():
                report.found[kind] |= {f"{argument}: {key}": value for key, value in each.items()}
        report.write()
        if None not in states.values():
            return
        time.sleep(1)


EVERY_TEST = "every test passes"
COMPILES = "compiles as one graph and makes a step"
CODES = "XLA multiplies FP8 codes"


def te_init(report: Report, _: str) -> None:
    """A step of masters of FP8 primary weights beside fused AdamW of as many float32 parameters, in turns."""
    import fp8_te_init as fti

    width, count = (4096, 16) if report.on_gpu else (64, 2)
    layers = [nn.Linear(width, width, bias=False, device=report.device, dtype=torch.bfloat16) for _ in range(count)]
    plain = [nn.Parameter(each.weight.detach().float()) for each in layers]
    low = fti.convert_linear(nn.Sequential(*layers), recipe="tensorwise")
    masters = fti.MasterOptimizer(torch.optim.AdamW, low.parameters(), lr=1e-4, fused=report.on_gpu)
    adam = torch.optim.AdamW(plain, lr=1e-4, fused=report.on_gpu)
    for parameter in (*low.parameters(), *plain):
        parameter.grad = torch.full(parameter.shape, 1e-3, device=report.device, dtype=parameter.dtype)
    times = report.timed({"AdamW": adam.step, "masters": masters.step})
    report.figure("milliseconds", times)
    ratio = times["masters"] / times["AdamW"]
    report.claim(MASTERS, ratio <= 2, f"{ratio:.2f} times")


MASTERS = "a step of masters, cast included, takes at most twice fused AdamW's"


def kernels(report: Report, dtype: str) -> None:
    """The bandwidth of every cast of 256 MB, beside a copy of as many bytes in turns."""
    import fp8_common as f8
    from fp8_common.torch import casts

    rows, columns = ((256 << 20) // getattr(torch, dtype).itemsize // 8192, 8192) if report.on_gpu else (256, 256)
    x = torch.randn(rows, columns, device=report.device).to(getattr(torch, dtype))
    scale = torch.tensor(3.0, device=report.device)
    dynamic = partial(casts.quantize_dynamic, x, f8.E4M3, f8.CANONICAL)
    read, codes = x.nbytes, x.numel()
    ours: dict[str, tuple[int, Callable[[], object]]] = {
        "amax": (read, lambda: casts.amax(x)),
        "cast": (read + codes, lambda: casts.quantize(x, scale, f8.E4M3)),
        "tensorwise": (2 * read + codes, dynamic),
        "cast + transpose": (read + 2 * codes, lambda: casts.quantize_with_amax(x, scale, f8.E4M3, both=True)),
        "row-wise": (read + codes, partial(dynamic, (1, 0))),
        "1x128": (read + codes, partial(dynamic, (1, 128))),
        "128x128": (read + codes, partial(dynamic, (128, 128))),
        "mx": (read + codes, lambda: casts.quantize_mx(x, f8.E4M3, "rceil")),
    }
    for name, (moved, run) in ours.items():
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=report.device)
        times = report.timed({"ours": run, "copy": partial(source.clone)}, 10, replayed=True)
        share = times["copy"] / times["ours"]
        report.claim(
            streamed(name, dtype), share >= LEAST_OF_COPY, f"{share:.0%}, {moved / times['ours'] / 1e6:.0f} GB/s"
        )


def streamed(name: str, dtype: str) -> str:
    """Return the claim about a cast."""
    return f"{name} of {dtype} reaches {LEAST_OF_COPY:.0%} of a copy's bandwidth"


# ---------------------------------------------------------------- what parts share


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    """Return what replays a run as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def gradients(
    call: Callable[..., torch.Tensor], given: tuple, grad: torch.Tensor, model: nn.Module | None = None
) -> object:
    """Make a forward and a backward; nothing is accumulated."""
    weights = (call if model is None else model).parameters()
    return torch.autograd.grad(call(*given), [given[0], *weights], grad)


def rotation(report: Report, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of attention, float32 [tokens, 64]."""
    angles = torch.arange(tokens, device=report.device)[:, None] * 500_000.0 ** (
        -torch.arange(64, device=report.device) / 64
    )
    return angles.cos(), angles.sin()


def is_about_a_program(claim: str) -> bool:
    """Return whether a claim is about what a program does, and not about how fast."""
    return claim.endswith((COMPILES, CODES, EVERY_TEST, "bit for bit"))


def speedup(report: Report, times: Mapping[str, float], contender: str) -> None:
    """Say whether a contender is faster than bfloat16."""
    ratio = times["bf16"] / times[contender]
    report.claim(FASTER, ratio > 1, f"{ratio:.3f}x, {times[contender]:.2f} ms")


FASTER = "faster than bfloat16"


def modelled_gpu(on_gpu: bool) -> str | None:
    """Return the GPU of the model of time that this is, which a CPU pretends to be; None for others."""
    return MODELS.get(torch.cuda.get_device_name()) if on_gpu else "H100"


MODELS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
"""Those of the model of time, which are SXM."""


def modelled(report: Report, contender: str) -> float | None:
    """Return the modelled milliseconds of a compiled block, where contender and GPU are modelled."""
    steps = json.loads((RESULTS / "modelled_block_4096.json").read_text())["steps"]
    found = [s["modelled_milliseconds"] for s in steps if (s["contender"], s["mode"]) == (contender, "compiled")]
    name = modelled_gpu(report.on_gpu)
    return found[0][name] if found and name else None


def versions(on_gpu: bool) -> dict[str, Any]:
    """Return the versions of what computes, from the driver up."""
    found = {
        "triton": importlib.import_module("triton").__version__,
        "cuda": torch.version.cuda,
        **machine()["versions"],
    }
    if on_gpu:
        found |= {"capability": torch.cuda.get_device_capability(), "nccl": torch.cuda.nccl.version()}
        found |= {"cudnn": torch.backends.cudnn.version(), "device": torch.cuda.get_device_name()}
        with contextlib.suppress(Exception):
            asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
            found["driver, clock, power"] = subprocess.run(
                asked, capture_output=True, text=True, check=True
            ).stdout.strip()
    return found


def name_of(run: Callable[[Report, str], None]) -> str:
    """Return the name of a part's function, for another process."""
    return f"{run.__module__}:{run.__qualname__}"


def command_of(name: str, output: Path, on_gpu: bool) -> list[str]:
    """Return the command of a process that runs the function of this name."""
    own = ["--part", name, "--output", str(output)]
    return [sys.executable, "-m", "benchmarks.gpu", *own, *([] if on_gpu else ["--pretend"])]
