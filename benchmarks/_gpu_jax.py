"""What `benchmarks.gpu` asks a GPU about JAX; functions as in `_gpu_parts`.

JAX is imported in the process of a part: its flags are read then, and it would take memory in others.
"""

import os
import re
import time
from typing import Any, NamedTuple

from benchmarks._gpu_parts import CODES, FASTER, LLAMA, TE, Report, speedup


def layer(report: Report, _: str) -> None:
    """Matmuls of JAX and their gradients, beside bfloat16 in turns, and whether XLA multiplies codes."""
    import jax
    import jax.numpy as jnp

    import fp8_jax_owg as owg

    dimensions = (((1,), (0,)), ((), ()))
    total = {"bf16": 0.0, "ours": 0.0}
    for rows, k, n in ((TE, 4096, 4096), (LLAMA, 4096, 14336)) if report.on_gpu else ((64, 32, 48),):
        keys, sizes = jax.random.split(jax.random.key(0), 3), ((rows, k), (k, n), (rows, n))
        arrays = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
        dots = {
            "bf16": lambda x, w: jax.lax.dot_general(x, w, dimensions),
            "ours": lambda x, w: owg.fp8_dot_general(x, w, dimensions, scaling=owg.CurrentScaling()),
        }
        steps = {
            name: jax.jit(jax.grad(lambda x, w, g, dot=dot: (dot(x, w) * g).astype(jnp.float32).sum(), (0, 1)))
            .lower(*arrays)
            .compile()
            for name, dot in dots.items()
        }
        products = re.findall(r"[^\n]*(?: dot\(|cublas\$lt\$matmul\$f8)[^\n]*", steps["ours"].as_text())
        report.claim(CODES, "f8e4m3fn" in steps["ours"].as_text(), f"{len(products)} products")
        runs = {name: lambda of=(step, arrays): jax.block_until_ready(of[0](*of[1])) for name, step in steps.items()}
        times = report.timed(runs)
        report.figure(f"{rows} x {k} -> {n}, milliseconds", times)
        total = {who: total[who] + ms for who, ms in times.items()}
    speedup(report, total, "ours")


class Step(NamedTuple):
    """A case of `benchmarks.jax_step`, what is wanted of it, and the environment that it runs in.

    Attributes:
        case: Loop, layers, dtype, what is recomputed, and attention.
        of_flax: The greatest time wanted, as a share of flax's; None where nothing is.
        of_bf16: The least speed wanted, as a multiple of bfloat16's.
        environment: Read when JAX starts.
    """

    case: tuple[Any, ...]
    of_flax: float | None = None
    of_bf16: float | None = None
    environment: dict[str, str] = {}  # noqa: RUF012


DECODER = ("decoder", 4, "bfloat16")
STEPS = {
    "decoder": Step(DECODER, 0.92, 1.22),
    "decoder, cudnn": Step((*DECODER, "", "cudnn"), None, 1.30),
    "decoder, remat": Step((*DECODER, "remat"), 0.95),
    "16 small layers": Step(("scan", 16, "bfloat16"), 0.85),
    "decoder, dots saved": Step((*DECODER, "dots", "cudnn")),
    "decoder, names saved": Step((*DECODER, "names", "cudnn")),
    "Llama-2-7B's layers": Step(("llama", 4, "bfloat16", "", "cudnn")),
    # where time goes that no byte explains
    "decoder, no graphs": Step(DECODER, environment={"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}),
    "decoder, XLA's casts": Step(DECODER, environment={"FP8_COMMON_BACKEND": "reference"}),
    "decoder, cuBLAS alone": Step(DECODER, environment={"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}),
}
"""What is timed beside bfloat16 and flax's FP8, by name."""


def claims(name: str) -> list[str]:
    """Return what is claimed of a step."""
    step = STEPS[name]
    wanted = [(step.of_flax, "takes at most {} of flax's time"), (step.of_bf16, "is {} times as fast as bfloat16")]
    return [FASTER, *(text.format(bound) for bound, text in wanted if bound)]


def steps(report: Report, name: str) -> None:
    """Time the gradients of a step in bfloat16, with flax's FP8 and with ours, in turns."""
    step = STEPS[name]
    os.environ |= step.environment
    import jax

    from benchmarks import jax_step

    # XLA times candidates while it compiles
    with report.alone():
        case = jax_step.Case(*step.case)
        shape = (2, 2048, 4096) if report.on_gpu else (1, 16, 64)
        if not report.on_gpu:
            case = case._replace(layers=1)
        made, seconds = {}, {}
        for who, operation in {"bf16": jax_step.PLAIN, "flax": jax_step.FLAX, "ours": jax_step.OURS}.items():
            begun = time.monotonic()
            made[who] = jax_step.compiled(case, jax_step.OPERATIONS[operation], 1, shape)
            seconds[who] = round(time.monotonic() - begun, 2)
    report.figure("device", str(jax.devices()[0].device_kind))
    report.figure("until compiled, seconds", seconds)
    for fact in ("temporaries", "lower", "compile"):
        report.figure(fact, {who: facts[fact] for who, (_, facts) in made.items()})
    times = report.timed({who: run for who, (run, _) in made.items()}, 1)
    report.figure("milliseconds", times)
    speedup(report, times, "ours")
    shown = ", ".join(f"{who} {ms:.2f} ms" for who, ms in times.items())
    of_flax, of_bf16 = times["ours"] / times["flax"], times["bf16"] / times["ours"]
    holds = [of_flax <= step.of_flax] if step.of_flax else []
    holds += [of_bf16 >= step.of_bf16] if step.of_bf16 else []
    for claim, one in zip(claims(name)[1:], holds, strict=True):
        report.claim(claim, one, f"{of_flax:.3f} of flax, {of_bf16:.3f}x bfloat16: {shown}")
