"""What does a cast cost: in the machine code of its kernel beside torchao's, and on a CPU beside torchao's and flax's?

    python -m benchmarks.casts [--parts code times] [--quick] [--arch 90] [--dtype bfloat16] [--fmt e4m3]

"code" writes kernels.json and kernels.md: kernels are compiled and counted, which needs triton, and nothing runs; what
they reach on a GPU is asked by `benchmarks.gpu`. "times" writes casts.json and casts.md: every cast of a matrix by
NumPy, PyTorch (eager and compiled) and JAX, and the casts that torchao and flax have as well; ratios are medians over
rounds in which all take turns, above 1 ours is faster.
"""

import argparse
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.linen import fp8_ops
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

import fp8_common
import fp8_common.jax
import fp8_common.torch
from benchmarks import _aot as aot
from benchmarks._common import median_ratio, options, save, table, take_turns
from benchmarks._sass import Sass, disassemble
from fp8_common.presets import te_delayed

# ---------------------------------------------------------------- machine code

HEADS = ("kernel", "bytes/elem (ideal)", "inst/elem", "of issue budget", "registers", "occupancy")
HEADS += ("shared ops", "narrow", "float64", "gates")
TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"
POINTERS = {"x_ptr": "*bf16", "y_ptr": "*fp8e4nv", "s_ptr": "*fp32"}
SIZE, WARPS, LARGEST = 8192, 4, 448.0
# Per streaming multiprocessor: registers, resident threads and bytes of shared memory, by compute capability.
REGISTERS, THREADS, SHARED = 65536, {89: 1536, 90: 2048, 100: 2048}, {89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
COMMON = {"K": SIZE, "BLOCK_SIZE": 128, "EPS": 1e-12}
# name in the table: function, arguments that are strides or sizes at run time, constants, elements per program
PEERS: dict[str, tuple[str, tuple[str, ...], Mapping[str, Any], int]] = {
    "torchao: 1x128": (
        "triton_fp8_blockwise_act_quant_lhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_0", "s_stride_dim_1", "M"),
        COMMON | {"NUM_GROUPS": 16, "x_stride_dim_1": 1, "y_stride_dim_1": 1, "s_stride_dim_0": 1},
        16 * 128,
    ),
    "torchao: 128x128, transposed only": (
        "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel",
        ("x_stride_dim_0", "y_stride_dim_1", "s_stride_dim_1", "M"),
        COMMON | {"N": SIZE, "x_stride_dim_1": 1, "y_stride_dim_0": 1, "s_stride_dim_0": 1},
        128 * 128,
    ),
}


def ours(figures: aot.Figures) -> tuple[str, ...]:
    """Return the row of one of this project's kernels."""
    case, sass = figures.case, figures.sass
    ideal = case.read + case.written
    budget = aot.INSTRUCTIONS_PER_BYTE[figures.capability] * ideal
    cells = (
        case.name,
        f"{figures.wide_bytes:.2f} ({ideal:g})",
        f"{figures.instructions:.1f}" if budget else "-",
        f"{100 * figures.instructions / budget:.0f} %" if budget else "-",
        sass.registers,
        f"{100 * occupancy(figures):.0f} %",
        sass.count("LDS|STS|LDSM|STSM"),
        figures.narrow,
        float64(sass),
        "; ".join(aot.failures(figures)) or "pass",
    )
    return tuple(map(str, cells))


def occupancy(figures: aot.Figures) -> float:
    """Return resident warps as a share of what the processor can hold."""
    warps, capability = figures.case.plan.num_warps, figures.capability
    # Registers are allocated to warps in units of 256, shared memory with 1 KiB more per program for the system.
    most = THREADS[capability] // 32
    per_warp = -(-max(figures.sass.registers, 16) * 32 // 256) * 256
    held = REGISTERS // (per_warp * warps), SHARED[capability] // (figures.compiled.shared + 1024)
    return min(most // warps, *held) * warps / most


def theirs(capability: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of torchao's kernels, where it is installed and has them."""
    module = importlib.import_module(TORCHAO) if importlib.util.find_spec("torchao") else None
    for name, (function, integers, constants, elements) in PEERS.items():
        if (target := getattr(module, function, None)) is None:
            continue
        types = POINTERS | dict.fromkeys(integers, "i32")
        limits = {argument: LARGEST for argument in target.arg_names if argument.endswith("MAX")}
        sass = disassemble(compiled(target, types, {**constants, **limits}, capability))
        accesses = sass.widths("LDG") + sass.widths("STG")
        narrow = sum(count for width, count in accesses.items() if width < 8)
        instructions = f"{sass.instructions * 32 * WARPS / elements:.1f}"
        counts = (sass.registers, "-", sass.count("LDS|STS|LDSM|STSM"), narrow, float64(sass), "-")
        yield (name, "-", instructions, "-", *map(str, counts))


def float64(sass: Sass) -> int:
    """Return the number of instructions in float64."""
    return sass.count("D(ADD|MUL|FMA|SETP)")


def compiled(function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], capability: int) -> bytes:
    """Return the machine code of a Triton function, autotuned ones without their tuner; arguments are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not isinstance(function, triton.runtime.JITFunction):
        function = function.fn
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in types}
    constants = {name: value for name, value in fixed.items() if name in function.arg_names}
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm["cubin"]


def count_code(chosen: argparse.Namespace) -> None:
    """Compile, count and write."""
    cases = list(aot.cases(chosen.dtype, chosen.fmt))[: 3 if chosen.quick else None]
    rows = [ours(aot.measure(case, chosen.arch)) for case in cases]
    rows += [] if chosen.quick else theirs(chosen.arch)
    what = {"capability": chosen.arch, "dtype": chosen.dtype, "format": chosen.fmt, "columns": HEADS, "rows": rows}
    save(chosen.results, "kernels", what, table([HEADS, *rows]))


# ---------------------------------------------------------------- times on a CPU

WINDOW = 16
Runs = dict[str, Callable[[], object]]


def casts(api: Any, x: Any, scale: Any) -> Runs:
    """Return every cast by its name; `api` is fp8_common or one of its framework packages."""
    return {
        "amax": lambda: api.amax(x),
        "scale given": lambda: api.quantize(x, scale, "e4m3"),
        "tensorwise": lambda: api.quantize(x, api.amax_to_scale(api.amax(x), "e4m3"), "e4m3"),
        "rowwise": lambda: api.quantize_rowwise(x, "e4m3"),
        "1 x 128": lambda: api.quantize_blockwise(x, "e4m3", (1, 128)),
        "128 x 128": lambda: api.quantize_blockwise(x, "e4m3", (128, 128)),
        "MX": lambda: api.quantize_mx(x, "e4m3"),
    }


def finished(function: Callable[..., Any], *arguments: Any) -> Callable[[], object]:
    """Return a call of a JAX function that waits for its result."""
    return lambda: jax.block_until_ready(function(*arguments))


def of_frameworks(x: np.ndarray) -> dict[str, Runs]:
    """Return for each cast how it is run in each framework."""
    scale = fp8_common.amax_to_scale(fp8_common.amax(x), "e4m3")
    in_torch = casts(fp8_common.torch, torch.from_numpy(x), torch.tensor(scale))
    found: dict[str, Runs] = {}
    for name, in_numpy in casts(fp8_common, x, scale).items():
        jitted = jax.jit(lambda x, scale, name=name: casts(fp8_common.jax, x, scale)[name]())
        found[name] = {
            "NumPy": in_numpy,
            "PyTorch, eager": in_torch[name],
            "PyTorch, compiled": torch.compile(in_torch[name]),
            "JAX, jit": finished(jitted, jnp.asarray(x), jnp.asarray(scale)),
        }
    return found


def beside_peers(x: np.ndarray, dtype: str) -> Iterator[tuple[str, Runs]]:
    """Yield casts that torchao or flax has too, ours first."""
    in_torch, in_jax = torch.from_numpy(x).to(getattr(torch, dtype)), jnp.asarray(x, getattr(jnp, dtype))
    f8t, f8j, e4m3 = fp8_common.torch, fp8_common.jax, jnp.float8_e4m3fn
    for name, kind, axis in (("tensorwise", "TENSORWISE", None), ("rowwise", "AXISWISE", -1)):
        settings = {"scaling_granularity": ScalingGranularity[kind], "axiswise_dim": axis}
        theirs = (in_torch, torch.float8_e4m3fn, LinearMMConfig())
        yield (
            f"PyTorch, {name}",
            {
                "ours": casts(f8t, in_torch, None)[name],
                "torchao": lambda theirs=theirs, settings=settings: hp_tensor_to_float8_dynamic(*theirs, **settings),
            },
        )
    scale, history = jnp.float32([80.0]), jnp.ones(WINDOW, jnp.float32)

    def delayed(x: jax.Array) -> object:
        window, _ = f8j.update_history(history, f8j.amax(x))
        made = f8j.amax_to_scale(jnp.max(history), "e4m3", te_delayed(), scale[0])
        return f8j.quantize(x, made, "e4m3"), made, window

    def flax_delayed(x: jax.Array) -> object:
        made, window = fp8_ops.update_fp8_meta(x, e4m3, 1 / scale, history)
        return fp8_ops.quantize(x, e4m3, made, x.dtype), made, window

    pairs = {
        "scale given": (
            lambda x: f8j.quantize(x, scale[0], "e4m3"),
            lambda x: fp8_ops.quantize(x, e4m3, 1 / scale, x.dtype),
        ),
        "delayed": (delayed, flax_delayed),
    }
    for name, (ours, theirs) in pairs.items():
        yield f"JAX, {name}", {"ours": finished(jax.jit(ours), in_jax), "flax": finished(jax.jit(theirs), in_jax)}


def measure_times(chosen: argparse.Namespace) -> None:
    """Measure and write."""
    size, rounds = (128, 1) if chosen.quick else (2048, chosen.rounds)
    x = np.random.default_rng(0).standard_normal((size, size), np.float32)
    frameworks = {name: take_turns(runs, rounds) for name, runs in of_frameworks(x).items()}
    peers = {
        f"{name}, {dtype}": take_turns(runs, rounds)
        for dtype in ("float32", "bfloat16")
        for name, runs in beside_peers(x, dtype)
    }
    heads = list(next(iter(frameworks.values())))
    rows = [(f"{size} x {size} float32, milliseconds", *heads)]
    rows += [
        (name, *(f"{1e3 * statistics.median(times[head]):.2f}" for head in heads)) for name, times in frameworks.items()
    ]
    compared = [(f"{size} x {size}", "peer", "its time / ours")]
    for name, times in peers.items():
        peer = next(other for other in times if other != "ours")
        compared.append((name, peer, f"{median_ratio(times[peer], times['ours']):.2f}"))
    save(chosen.results, "casts", {"casts": frameworks, "peers": peers}, f"{table(rows)}\n\n{table(compared)}")


def main() -> None:
    """Do what is asked for, or both."""
    parser, parts = options(__doc__, rounds=31), {"code": count_code, "times": measure_times}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--arch", type=int, choices=aot.ARCHITECTURES, default=90, help="compute capability, times ten")
    parser.add_argument("--dtype", choices=tuple(aot.INPUT_BYTES), default="bfloat16")
    parser.add_argument("--fmt", choices=["e4m3", "e5m2"], default="e4m3")
    chosen = parser.parse_args()
    for part in chosen.parts:
        parts[part](chosen)


if __name__ == "__main__":
    main()
