"""What do time, memory and compilation of FP8 layers in JAX cost beside flax's?

    python -m benchmarks.jax_step [--quick] [--cases scan-4-bfloat16 ...] [--decoder BATCH TOKENS WIDTH]

A layer is two dense ones, width 256 to 1024 and back, with gelu between them, on 128 rows; layers stand one after the
other, or in a scan. A decoder's layers have attention before them, norms and residuals, in a scan: width 512, 8 heads
and 4 texts of 128 tokens, if `--decoder` says no others. Those of "llama" have rotary positions and a gated MLP of
43/16 of the width, which is Llama-2-7B's at width 4096. Programs take turns, and the median ratio of a round counts.
Beside it stand ratios of the bytes that XLA allocates for temporaries and of processor times to lower and to compile.
"matmuls alone" multiplies float32 operands, which is how XLA on CPUs multiplies FP8 ones, without casts, amax and
state: what is beyond it is what FP8 costs. "without FP8" is our time divided by that of the layers as they are. What
misses its goal is bold.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import fp8_jax_owg as owg
from benchmarks._common import median_ratio, options, save, table, take_turns
from fp8_jax_owg.linen import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralOp, promote_dtype

ROWS, WIDTH, COMPILATIONS = 128, 256, 5
DECODED = 4, 128, 512
OURS, FLAX, ALONE, PLAIN = "ours", "flax direct", "matmuls alone", "without FP8"
GOALS = {"time": 0.7, "temporaries": 1.0, "lower": 1.2, "compile": 1.2}
"""The greatest ratio to flax's with which a column reaches its goal."""


POLICIES = {
    "": None,
    "remat": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("qkv", "o", "up"),
}
"""What `jax.checkpoint` saves of a layer, by the word for it."""


class Case(NamedTuple):
    """One arrangement of layers.

    Attributes:
        loop: "unrolled", "scan", or "decoder" and "llama", which are scanned too.
        layers: How many.
        dtype: Of activations.
        remat: A key of `POLICIES`; nothing is recomputed with "".
        attention: "xla", or on a GPU "cudnn".
    """

    loop: str
    layers: int
    dtype: str
    remat: str = ""
    attention: str = "xla"

    @property
    def name(self) -> str:
        """How the case is asked for."""
        own = [self.remat] * bool(self.remat) + [self.attention] * (self.attention != "xla")
        return "-".join([self.loop, str(self.layers), self.dtype, *own])


CASES = (
    *(Case("unrolled", n, dtype) for n, dtype in ((4, "float32"), (8, "bfloat16"), (16, "bfloat16"))),
    *(Case("scan", n, dtype) for n in (1, 4, 16, 32) for dtype in ("bfloat16", "float32")),
    *(Case("scan", n, "bfloat16", "remat") for n in (4, 32)),
    *(Case("decoder", 8, "bfloat16", remat) for remat in ("", "remat")),
)


def multiply_in_float32(x: jax.Array, k: jax.Array, dims: Any, **_: Any) -> jax.Array:
    """Multiply as XLA on CPUs multiplies FP8 operands, and so backward."""
    wide = x.astype(jnp.float32), k.astype(jnp.float32)
    return jax.lax.dot_general(*wide, dims, preferred_element_type=jnp.float32).astype(x.dtype)


OPERATIONS: dict[str, Any] = {
    OURS: Fp8DotGeneralOp,
    FLAX: nn.Fp8DirectDotGeneralOp,
    ALONE: lambda: multiply_in_float32,
    PLAIN: lambda: jax.lax.dot_general,
}


class Block(nn.Module):
    """One layer."""

    operation: Any
    case: Case

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape."""
        width, dtype = h.shape[-1], jnp.dtype(self.case.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=dtype)

        def dense(features: int, name: str, x: jax.Array) -> jax.Array:
            own = {"promote_dtype": promote_dtype} if self.operation is Fp8DotGeneralOp else {}
            made = nn.Dense(features, use_bias=False, dtype=dtype, dot_general_cls=self.operation, name=name, **own)
            return checkpoint_name(made(x), name)

        if self.case.loop not in ("decoder", "llama"):
            return dense(width, "down", nn.gelu(dense(4 * width, "up", h)))
        heads = (*h.shape[:2], max(8, width // 128), -1)
        q, k, v = (one.reshape(heads) for one in jnp.split(dense(3 * width, "qkv", norm()(h)), 3, -1))
        if self.case.loop == "llama":
            q, k = rotate(q), rotate(k)
        implementation = "cudnn" if self.case.attention == "cudnn" and jax.default_backend() == "gpu" else None
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        h = h + dense(width, "o", attended.reshape(h.shape))
        if self.case.loop == "decoder":
            return h + dense(width, "down", nn.gelu(dense(4 * width, "up", norm()(h))))
        hidden, gate = jnp.split(dense(width * 43 // 16 * 2, "up", norm()(h)), 2, -1)
        return h + dense(width, "down", nn.silu(gate) * hidden)


def rotate(x: jax.Array) -> jax.Array:
    """Return queries or keys, [texts, tokens, heads, even size], with rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (of(angles)[:, None].astype(x.dtype) for of in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Step(nn.Module):
    """A layer as `nn.scan` wants it."""

    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Return the carry and nothing."""
        return self.block(name="block")(h), None


class Stack(nn.Module):
    """Layers one after the other."""

    operation: Any
    case: Case

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape."""
        # the loop keeps XLA from merging what is recomputed with the forward
        policy = POLICIES[self.case.remat]
        block = nn.remat(Block, prevent_cse=self.case.loop == "unrolled", policy=policy) if policy else Block
        make = functools.partial(block, self.operation, self.case)
        if self.case.loop == "unrolled":
            for i in range(self.case.layers):
                h = make(name=f"layer_{i}")(h)
            return h
        axes, rngs = {"params": 0, OVERWRITE_WITH_GRADIENT: 0}, {"params": True}
        scanned = nn.scan(Step, variable_axes=axes, split_rngs=rngs, length=self.case.layers)
        return scanned(make, name="layers")(h, None)[0]


def compiled(
    case: Case, operation: Any, compilations: int, decoded: tuple[int, int, int]
) -> tuple[Callable[[], object], dict[str, float]]:
    """Return a call of the compiled gradient, and what is known of it: medians over some compilations."""
    shape = decoded if case.loop in ("decoder", "llama") else (ROWS, WIDTH)
    x, model = jax.random.normal(jax.random.key(0), shape, case.dtype), Stack(operation, case)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    grad = owg.grad if operation is Fp8DotGeneralOp else jax.grad
    gradient = grad(lambda variables, x: jnp.square(model.apply(variables, x).astype(jnp.float32)).mean())
    made = []
    for _ in range(compilations):
        jax.clear_caches()
        # time of the processor, which others on the machine change less than that of the clock
        start = time.process_time()
        lowered = jax.jit(gradient).lower(variables, x)
        middle = time.process_time()
        program = lowered.compile()
        made.append((middle - start, time.process_time() - middle))
    lower, compile_ = map(statistics.median, zip(*made, strict=True))
    facts = {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "lower": lower,
        "compile": compile_,
        "operations": lowered.as_text().count("stablehlo."),
    }
    return lambda: jax.block_until_ready(program(variables, x)), facts


def measure(case: Case, rounds: int, compilations: int, decoded: tuple[int, int, int]) -> dict[str, Any]:
    """Return one row: what ours takes, divided by what flax takes."""
    made = {name: compiled(case, operation, compilations, decoded) for name, operation in OPERATIONS.items()}
    times = take_turns({name: run for name, (run, _) in made.items()}, rounds)
    facts = {name: found for name, (_, found) in made.items()}
    row: dict[str, Any] = {"case": case.name, "time": median_ratio(times[OURS], times[FLAX])}
    row |= {name: facts[OURS][name] / max(facts[FLAX][name], 1e-9) for name in ("temporaries", "lower", "compile")}
    row |= {ALONE: median_ratio(times[ALONE], times[FLAX]), PLAIN: median_ratio(times[OURS], times[PLAIN])}
    row["milliseconds"] = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    row |= {"operations": facts[OURS]["operations"], "operations of flax": facts[FLAX]["operations"]}
    return row


def main() -> None:
    """Measure and write."""
    parser = options(__doc__, rounds=21)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--decoder", nargs=3, type=int, default=DECODED, metavar=("BATCH", "TOKENS", "WIDTH"))
    chosen = parser.parse_args()
    cases = [Case("scan", 2, "bfloat16")] if chosen.quick else [c for c in CASES if c.name in (chosen.cases or c.name)]
    rounds, compilations = (1, 1) if chosen.quick else (chosen.rounds, COMPILATIONS)
    rows = [measure(case, rounds, compilations, tuple(chosen.decoder)) for case in cases]
    lines = [("case; ours / flax direct", *GOALS, ALONE, PLAIN, "operations", "of flax")]
    for row in rows:
        cells = [f"**{row[name]:.2f}**" if row[name] > goal else f"{row[name]:.2f}" for name, goal in GOALS.items()]
        counts = (f"{row[name]:,}" for name in ("operations", "operations of flax"))
        lines.append((row["case"], *cells, f"{row[ALONE]:.2f}", f"{row[PLAIN]:.2f}", *counts))
    save(chosen.results, "jax_step", {"goals": GOALS, "decoder": chosen.decoder, "rows": rows}, table(lines))


if __name__ == "__main__":
    main()
