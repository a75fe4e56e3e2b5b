"""Timings of the kernels on a GPU, beside what PyTorch, and peers if any are given, do for the same task.

Every round times all implementations once in alternating order with a cold L2 cache; medians are over the rounds.
The ceiling is a plain copy of as many bytes, which takes turns with them. Results of ours are compared with the NumPy
definition before timing.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import fp8_common as f8
from benchmarks.peers import NONE, Peers
from benchmarks.record import COPY, Log, Measurement
from fp8_common._reference.gradients import round_gradients, sum_rounded
from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.formats import Format, get_format
from fp8_common.policy import CANONICAL, POWER_OF_2, ScalePolicy
from fp8_common.testing.compare import as_numpy, assert_same_bits
from fp8_common.torch import _triton, casts, foreach
from fp8_common.torch.blocks import Block, amax_by, expand_blocks, split_blocks
from fp8_common.torch.numerics import amax_of, divide, e8m0_from_amax, scale_from_amax, scale_of_e8m0
from fp8_common.torch.rounding import quantize, values
from fp8_common.torch.sharding import gradients

logger = logging.getLogger(__name__)
ROUNDS = 50
WARM_UP = 5
COLUMNS = 8192
FLUSH_BYTES, FLUSHES = 512 << 20, 4
"""Longer than it takes to empty the cache: meanwhile Python enqueues what is timed, so that no gap is timed."""
CASTS = ("amax", "cast", "tensorwise", "cast + transpose", "row-wise", "1x128", "128x128", "mx")
KERNELS = (*CASTS, "pack gradients", "sum gradients")
FOREACH_SHARDS = 200
GRADIENT_RANKS = 8
FOREACH = f"foreach amax, {FOREACH_SHARDS} shards"

Run = Callable[[], object]
Timer = Callable[[Run], float]


def run(
    *,
    megabytes: Sequence[int],
    dtypes: Sequence[str],
    fmt: str,
    kernels: Sequence[str] = (),
    minutes: float = math.inf,
    save: Callable[[str], None] = lambda text: None,
    peers: Peers = NONE,
) -> str:
    """Measure on the current GPU and return the result as JSON.

    A task that fails is named under "failures" and does not stop the others; what is not measured yet is named under
    "left_out".

    Args:
        megabytes: Sizes of the inputs.
        dtypes: Their dtypes.
        fmt: The FP8 format.
        kernels: Names of the tasks to measure; all if empty.
        minutes: No task begins later than this.
        save: Takes the result so far after every task, so that a run that is cut short leaves one.
        peers: Whose implementations are timed beside ours.

    Raises:
        Fp8Error: A name in `kernels` is no task.
        Fp8UnsupportedError: There is no GPU, or it cannot run the kernels.
    """
    check_kernels(kernels)
    device, end = gpu(), time.monotonic() + 60 * minutes
    timer, form = cuda_timer(), get_format(fmt)
    log = Log(device=torch.cuda.get_device_name(), ceiling=copy_ceiling(timer), save=save)
    wanted = [kernel for kernel in (FOREACH, *KERNELS) if not kernels or kernel in kernels]
    inputs = [(name, size) for name in dtypes for size in megabytes]
    log.left_out = [kernel for kernel in wanted if kernel == FOREACH]
    log.left_out += [_label(kernel, *at) for at in inputs for kernel in wanted if kernel != FOREACH]
    if FOREACH in wanted:
        log.attempt(FOREACH, lambda: compare_foreach(device, timer, peers=peers))
    for name, size in inputs:
        if time.monotonic() > end:
            break
        torch.compiler.reset()  # the same functions on another input: no recompilation, no dynamic shapes
        x = example(size << 20, getattr(torch, name), device)
        for kernel, (moved, runs, check) in tasks(x, form, peers).items():
            if kernel in wanted and time.monotonic() < end:
                runs = runs | copying(moved, device)
                log.attempt(_label(kernel, name, size), partial(compare, kernel, x, moved, runs, check, timer))
    return log.text()


def check_kernels(kernels: Sequence[str]) -> None:
    """Refuse names that are no tasks.

    Raises:
        Fp8Error: There is one.
    """
    if unknown := [name for name in kernels if name not in (FOREACH, *KERNELS)]:
        raise Fp8Error(f"There is no task {unknown[0]!r} to time. Use one of {', '.join((FOREACH, *KERNELS))}.")


def gpu() -> torch.device:
    """Return the GPU that is timed.

    Raises:
        Fp8UnsupportedError: There is none, or it cannot run the kernels.
    """
    if not torch.cuda.is_available() or not _triton.takes(torch.empty(1, device="cuda")):
        raise Fp8UnsupportedError(
            "Timing needs an NVIDIA GPU of compute capability 8.9 or newer. Use --static elsewhere."
        )
    return torch.device("cuda")


def copying(moved: int, device: torch.device) -> dict[str, Run]:
    """Return a plain copy that moves as many bytes as a task: the ceiling for its size."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {COPY: lambda: target.copy_(source)}


def example(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normally distributed values [rows, 8192] of about `size` bytes, the same on every machine."""
    # Whole blocks of 128 rows where there are that many; 4, because the packed transpose takes rows by fours.
    rows = max(4, size // (dtype.itemsize * COLUMNS) // 128 * 128)
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(rows, COLUMNS, generator=generator).to(device=device, dtype=dtype)


def tasks(x: torch.Tensor, fmt: Format, peers: Peers = NONE) -> dict[str, tuple[int, dict[str, Run], Run]]:
    """Return for each kernel: bytes moved at least, implementations, and the check of ours (returns True)."""
    n, size, scale = x.numel(), x.element_size(), torch.tensor(3.0, device=x.device)
    transpose = _triton.plans().cast_transpose(*x.shape, _triton.name_of(x.dtype), fmt)
    eager = {
        "amax": lambda: amax_of(x),
        "cast": lambda: quantize(x, scale, fmt),
        "tensorwise": lambda: _by_operations(x, fmt, None),
        "cast + transpose": lambda: _transposed(quantize(x, scale, fmt)),
        "row-wise": lambda: _by_operations(x, fmt, (1, 0)),
        "1x128": lambda: _by_operations(x, fmt, (1, 128)),
        "128x128": lambda: _by_operations(x, fmt, (128, 128)),
        "mx": lambda: _mx_by_operations(x, fmt),
    }
    ours = {
        "amax": lambda: casts.amax(x),
        "cast": lambda: casts.quantize(x, scale, fmt),
        "tensorwise": lambda: casts.quantize_dynamic(x, fmt, CANONICAL),
        "cast + transpose": lambda: _triton.launch(transpose, x.device, x_ptr=x, scale_ptr=scale),
        "row-wise": lambda: casts.quantize_dynamic(x, fmt, CANONICAL, (1, 0)),
        "1x128": lambda: casts.quantize_dynamic(x, fmt, CANONICAL, (1, 128)),
        "128x128": lambda: casts.quantize_dynamic(x, fmt, CANONICAL, (128, 128)),
        "mx": lambda: casts.quantize_mx(x, fmt, "rceil"),
    }
    read, written = {"tensorwise": 2}, {"amax": 0, "cast + transpose": 2 * n}
    offered = peers.runs(x, fmt)
    result = {}
    for name, run in ours.items():
        runs = {"ours": run, "torch eager": eager[name], "torch.compile": torch.compile(eager[name], dynamic=False)}
        result[name] = (
            n * size * read.get(name, 1) + written.get(name, n),
            runs | offered.get(name, {}),
            _checker(name, x, fmt, run),
        )
    return result | gradient_tasks(x, fmt)


def gradient_tasks(x: torch.Tensor, fmt: Format) -> dict[str, tuple[int, dict[str, Run], Run]]:
    """Return the tasks of `tasks` for gradients: x as one row for each of eight ranks, into a message and summed."""
    rows = x.reshape(GRADIENT_RANKS, -1)
    block = gradients.BLOCK
    columns, sent = rows.shape[1], x.numel() + 4 * GRADIENT_RANKS * -(-rows.shape[1] // block[1])
    message, first = gradients.pack_gradients(rows, rows[:, :0], fmt), slice(0, 32 * block[1])
    codes, scales = _by_operations(rows, fmt, block, POWER_OF_2)
    want = round_gradients(as_numpy(rows[:, first]), fmt)

    def pack() -> torch.Tensor:
        return gradients.pack_gradients(rows, rows[:, :0], fmt)

    def total() -> torch.Tensor:
        return gradients.sum_gradients(message, (columns, 0), x.dtype, fmt)[0]

    def added() -> torch.Tensor:
        parts, of_parts = split_blocks(codes, scales, block)
        return (values(parts, fmt) * divide(1.0, of_parts)).view(codes.shape).sum(0)

    def check_pack() -> bool:
        assert_same_bits(pack()[:, :columns][:, first].contiguous(), want.data, fmt=fmt, name="pack gradients")
        return True

    def check_sum() -> bool:
        assert_same_bits(total()[first], sum_rounded(want.data, want.scale, fmt), name="sum gradients")
        return True

    eager: dict[str, Run] = {
        "pack gradients": lambda: _by_operations(rows, fmt, block, POWER_OF_2),
        "sum gradients": added,
    }
    ways = (
        ("pack gradients", pack, x.nbytes + sent, check_pack),
        ("sum gradients", total, sent + 4 * columns, check_sum),
    )
    return {
        name: (
            moved,
            {"ours": run, "torch eager": eager[name], "torch.compile": torch.compile(eager[name], dynamic=False)},
            check,
        )
        for name, run, moved, check in ways
    }


def compare(
    kernel: str, x: torch.Tensor, moved: int, runs: Mapping[str, Run], check: Run, timer: Timer, rounds: int = ROUNDS
) -> list[Measurement]:
    """Time all implementations of one kernel; those that fail are left out with a message."""
    equal = bool(check())
    usable = {name: run for name, run in runs.items() if _works(kernel, name, run)}
    times: dict[str, list[float]] = {name: [] for name in usable}
    for i in range(rounds):
        # In turn from both ends, so that none always follows the same one: clocks and temperature change during a run.
        order = list(usable) if i % 2 == 0 else list(reversed(usable))
        for name in order:
            times[name].append(timer(usable[name]))
    return [
        Measurement(
            kernel=kernel,
            implementation=name,
            dtype=str(x.dtype).removeprefix("torch."),
            shape=tuple(x.shape),
            bytes=moved,
            seconds=statistics.median(seconds),
            runs=rounds,
            equal=equal if name == "ours" else None,
        )
        for name, seconds in times.items()
    ]


def compare_foreach(device: torch.device, timer: Timer, rounds: int = ROUNDS, peers: Peers = NONE) -> list[Measurement]:
    """Time the amax of 200 FSDP shards: ours in one launch, torch's ways, and those of peers."""
    shards = [torch.randn(4096 * (1 + i % 7) * 16, device=device, dtype=torch.float32) for i in range(FOREACH_SHARDS)]
    everything = torch.cat(shards)
    want = torch.stack([amax_of(shard) for shard in shards])
    runs = {
        "ours": lambda: foreach.amax_bits(shards),
        "torch._foreach_norm": lambda: torch.stack(torch._foreach_norm(shards, ord=float("inf"))),
        **peers.precompute(FOREACH_SHARDS, device),
    }
    moved = everything.numel() * 4
    return compare(
        FOREACH,
        everything,
        moved,
        runs | copying(moved, device),
        lambda: torch.equal(foreach.amax_bits(shards).view(torch.float32), want),
        timer,
        rounds,
    )


def cuda_timer() -> Timer:
    """Return a timer with CUDA events that empties the L2 cache before each run."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(run: Run) -> float:
        for _ in range(FLUSHES):
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return measure


def copy_ceiling(timer: Timer, size: int = 512 << 20, device: str = "cuda") -> float:
    """Return the bandwidth of a plain copy, bytes read and written, in GB/s."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(timer(lambda: target.copy_(source)) for _ in range(ROUNDS)) / 1e9


def _label(kernel: str, dtype: str, megabytes: int) -> str:
    return f"{kernel}, {dtype}, {megabytes} MB"


def _by_operations(
    x: torch.Tensor, fmt: Format, block: Block, policy: ScalePolicy = CANONICAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales, made by torch's own operations alone."""
    amax = amax_by(x, block)
    scale = scale_from_amax(amax, fmt, policy)
    return quantize(*split_blocks(x, scale, block), fmt, amax).view(x.shape), scale


def _mx_by_operations(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    amax = amax_by(x, MX_BLOCK)
    scales = e8m0_from_amax(amax, fmt, "rceil")
    return quantize(x, expand_blocks(scale_of_e8m0(scales), MX_BLOCK, x.shape), fmt, amax), scales


def _transposed(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return data, data.view(torch.uint8).t().contiguous()


def _checker(name: str, x: torch.Tensor, fmt: Format, run: Run) -> Run:
    """Return a check of ours on the first rows; row-independent kernels give them the same bits as the whole."""

    def check() -> bool:
        # 256 rows are two whole blocks of 128.
        rows = as_numpy(x[:256])
        if name == "tensorwise":
            whole = f8.amax_to_scale(as_numpy(x.abs().max().float()), fmt)
            data, scale = casts.quantize_dynamic(x, fmt, CANONICAL)[:2]
            assert_same_bits(scale, whole, name=name)
            assert_same_bits(data[:256], f8.quantize(rows, whole, fmt), fmt=fmt, source=rows, name=name)
            return True
        definitions = {
            "row-wise": lambda: f8.quantize_rowwise(rows, fmt).data,
            "1x128": lambda: f8.quantize_blockwise(rows, fmt).data,
            "128x128": lambda: f8.quantize_blockwise(rows, fmt, (128, 128)).data,
            "mx": lambda: f8.quantize_mx(rows, fmt).data,
            "cast": lambda: f8.quantize(rows, _THREE, fmt),
            "cast + transpose": lambda: f8.quantize(rows, _THREE, fmt),
        }
        got: Any = run()
        if name == "amax":
            return float(got) == float(x.abs().max())
        data = got[0] if isinstance(got, tuple) else got
        assert_same_bits(data[:256], definitions[name](), fmt=fmt, source=rows, name=name)
        return True

    return check


_THREE = as_numpy(torch.tensor(3.0))


def _works(kernel: str, name: str, run: Run) -> bool:
    try:
        for _ in range(WARM_UP):
            run()
    except Exception as error:
        if name == "ours":
            raise
        logger.warning("%s cannot do %s here: %s", name, kernel, error)
        return False
    return True
