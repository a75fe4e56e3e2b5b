"""Decides how the kernels are timed on a GPU, against what PyTorch, torchao and TransformerEngine do for the same task.

Every round times all implementations once in alternating order with a cold L2 cache; medians are over the rounds.
The ceiling is a plain copy of the same run. Results of ours are compared with the NumPy definition before timing.
"""

import importlib
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import fp8_common as f8
from fp8_common.bench.record import Measurement, document, render
from fp8_common.errors import Fp8UnsupportedError
from fp8_common.formats import Format, get_format
from fp8_common.policy import CANONICAL
from fp8_common.testing.arrays import as_numpy
from fp8_common.testing.compare import assert_same_bits
from fp8_common.torch import foreach, triton_backend
from fp8_common.torch.amax import amax_all
from fp8_common.torch.quantize import quantize, quantize_blockwise, quantize_mx, quantize_rowwise

logger = logging.getLogger(__name__)
ROUNDS = 50
WARM_UP = 5
COLUMNS = 8192
FLUSH_BYTES = 512 << 20
FOREACH_SHARDS = 200

Run = Callable[[], object]
Timer = Callable[[Run], float]


def run(*, megabytes: Sequence[int], dtypes: Sequence[str], fmt: str) -> str:
    """Measure everything on the current GPU and return the result as JSON.

    Raises:
        Fp8UnsupportedError: There is no GPU, or it cannot run the kernels.
    """
    if not torch.cuda.is_available() or not triton_backend.applies(torch.empty(1, device="cuda")):
        raise Fp8UnsupportedError(
            "Timing needs an NVIDIA GPU of compute capability 8.9 or newer. Use --static elsewhere."
        )
    timer = cuda_timer()
    measurements: list[Measurement] = []
    for name in dtypes:
        for size in megabytes:
            x = example(size << 20, getattr(torch, name), torch.device("cuda"))
            for kernel, (moved, runs, check) in tasks(x, get_format(fmt)).items():
                measurements += compare(kernel, x, moved, runs, check, timer)
    measurements += compare_foreach(torch.device("cuda"), get_format(fmt), timer)
    return render(document(measurements, device=torch.cuda.get_device_name(), ceiling=copy_ceiling(timer)))


def example(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normally distributed values [rows, 8192] of about `size` bytes, the same on every machine."""
    rows = max(4, size // (dtype.itemsize * COLUMNS) // 128 * 128)
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(rows, COLUMNS, generator=generator).to(device=device, dtype=dtype)


def tasks(x: torch.Tensor, fmt: Format) -> dict[str, tuple[int, dict[str, Run], Run]]:
    """Return for each kernel: bytes moved at least, implementations, and the check of ours (returns True)."""
    n, size, scale = x.numel(), x.element_size(), torch.tensor(3.0, device=x.device)
    backend = triton_backend
    eager = {
        "amax": lambda: amax_all(x),
        "cast": lambda: quantize(x, scale, fmt),
        "cast + transpose": lambda: _transposed(quantize(x, scale, fmt)),
        "row-wise": lambda: quantize_rowwise(x, fmt, -1, CANONICAL),
        "1x128": lambda: quantize_blockwise(x, fmt, (1, 128), CANONICAL),
        "128x128": lambda: quantize_blockwise(x, fmt, (128, 128), CANONICAL),
        "mx": lambda: quantize_mx(x, fmt, "rceil"),
    }
    ours = {
        "amax": lambda: backend.amax_all(x),
        "cast": lambda: backend.quantize(x, scale, fmt),
        "cast + transpose": lambda: backend.quantize_transposed(x, scale, fmt),
        "row-wise": lambda: backend.quantize_rowwise(x, fmt, -1, CANONICAL),
        "1x128": lambda: backend.quantize_blockwise(x, fmt, (1, 128), CANONICAL),
        "128x128": lambda: backend.quantize_blockwise(x, fmt, (128, 128), CANONICAL),
        "mx": lambda: backend.quantize_mx(x, fmt, "rceil"),
    }
    written = {"amax": 0, "cast + transpose": 2 * n}
    peers = peer_runs(x, fmt)
    result = {}
    for name, run in ours.items():
        runs = {"ours": run, "torch eager": eager[name], "torch.compile": torch.compile(eager[name])}
        result[name] = (n * size + written.get(name, n), runs | peers.get(name, {}), _checker(name, x, fmt, run))
    return result


def compare(
    kernel: str, x: torch.Tensor, moved: int, runs: Mapping[str, Run], check: Run, timer: Timer, rounds: int = ROUNDS
) -> list[Measurement]:
    """Time all implementations of one kernel; those that fail are left out with a message."""
    equal = bool(check())
    usable = {name: run for name, run in runs.items() if _works(kernel, name, run)}
    times: dict[str, list[float]] = {name: [] for name in usable}
    for i in range(rounds):
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


def compare_foreach(device: torch.device, fmt: Format, timer: Timer, rounds: int = ROUNDS) -> list[Measurement]:
    """Time the amax of 200 FSDP shards: ours in one launch, torchao's way with `_foreach_norm`."""
    shards = [torch.randn(4096 * (1 + i % 7) * 16, device=device, dtype=torch.float32) for i in range(FOREACH_SHARDS)]
    everything = torch.cat(shards)
    want = torch.stack([amax_all(shard) for shard in shards])
    runs = {
        "ours": lambda: foreach.amax_keys(shards),
        "torch._foreach_norm": lambda: torch.stack(torch._foreach_norm(shards, ord=float("inf"))),
    }
    moved = everything.numel() * 4
    return compare(
        f"foreach amax, {FOREACH_SHARDS} shards",
        everything,
        moved,
        runs,
        lambda: torch.equal(foreach.amax_keys(shards).view(torch.float32), want),
        timer,
        rounds,
    )


def peer_runs(x: torch.Tensor, fmt: Format) -> dict[str, dict[str, Run]]:
    """Return what torchao and TransformerEngine offer for each kernel, as far as they can be imported."""
    found: dict[str, dict[str, Run]] = {}
    blocks = _optional("torchao.prototype.blockwise_fp8_training.kernels")
    if blocks is not None:
        found["1x128"] = {"torchao": lambda: blocks.triton_fp8_blockwise_act_quant_lhs(x, 128)}
    mx = _optional("torchao.prototype.mx_formats.mx_tensor")
    config = _optional("torchao.prototype.mx_formats.config")
    if mx is not None and config is not None:
        mode, dtype = config.ScaleCalculationMode.RCEIL, getattr(torch, fmt.dtype_name)
        found["mx"] = {"torchao": torch.compile(lambda: mx.to_mx(x, dtype, 32, mode))}
    engine = _optional("transformer_engine.pytorch.tensor.float8_tensor")
    tex = _optional("transformer_engine_torch")
    if engine is not None and tex is not None:
        kind = tex.DType.kFloat8E4M3 if fmt.name == "e4m3" else tex.DType.kFloat8E5M2
        quantizer = engine.Float8Quantizer(
            scale=torch.ones(1, device=x.device), amax=torch.zeros(1, device=x.device), fp8_dtype=kind
        )
        found["cast + transpose"] = {"TransformerEngine": lambda: quantizer(x)}
    return found


def cuda_timer() -> Timer:
    """Return a timer with CUDA events that empties the L2 cache before each run."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(run: Run) -> float:
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


def _transposed(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return data, data.view(torch.uint8).t().contiguous()


def _checker(name: str, x: torch.Tensor, fmt: Format, run: Run) -> Run:
    """Return a check of ours on the first rows; row-independent kernels give them the same bits as the whole."""

    def check() -> bool:
        rows = as_numpy(x[:256])
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


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a peer that is installed may still fail to load
        logger.info("%s is left out: %s", module, error)
        return None
