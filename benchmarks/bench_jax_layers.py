"""Times a training step of stacked layers with fp8_jax_owg's product against flax's: loops, remat, pipelines.

    python -m benchmarks.bench_jax_layers [--rounds 21] [--cases linen-scan-4-bfloat16 ...]

A layer is two dense ones, width 256 to 1024 and back, with gelu between them, on 128 rows. Programs take turns, and
each round gives one ratio of times; its median is kept. Beside it stand the ratios of the bytes that XLA allocates for
temporaries and of the processor times to lower and to compile (medians of five turns), and the numbers of traced
equations and of lowered operations. "products alone" is the same program with products of float32 operands, which is
how XLA on CPUs multiplies FP8 ones, and without casts, amax and state: what is beyond it is what FP8 costs.
Writes benchmarks/results/jax-layers.json and jax-layers.md, which the guide includes.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops

from fp8_common._machine import processor_name, usable_cores
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.linen import Fp8DotGeneralOp, LayerwiseShardablePipelined

RESULT = Path(__file__).parent / "results" / "jax-layers.json"
ROWS, WIDTH = 128, 256
TURNS = 5
"""How often each program is lowered and compiled; odd."""
OWG = "_overwrite_with_gradient"
OURS, FLAX, PRODUCTS, PLAIN = "fp8_jax_owg", "flax direct", "products alone", "unquantized"
GOALS = {f"time / {FLAX}": 0.7, f"temporaries / {FLAX}": 1.0, f"lower / {FLAX}": 1.2, f"compile / {FLAX}": 1.2}
"""The greatest figures with which a column reaches its goal."""


def multiply_in_float32(x: jax.Array, k: jax.Array, dims: Any, **_: Any) -> jax.Array:
    """Multiply as XLA on CPUs multiplies FP8 operands, and so backward."""
    wide = x.astype(jnp.float32), k.astype(jnp.float32)
    return jax.lax.dot_general(*wide, dims, preferred_element_type=jnp.float32).astype(x.dtype)


def products_alone() -> Callable[..., jax.Array]:
    """Return the product, as Linen makes an operation."""
    return multiply_in_float32


LINEN = {OURS: Fp8DotGeneralOp, FLAX: nn.Fp8DirectDotGeneralOp, PRODUCTS: products_alone, PLAIN: None}


class Case(NamedTuple):
    """One arrangement of layers."""

    flavour: str
    """ "linen" or "nnx"."""
    loop: str
    """ "unrolled", "scan" or "pipeline" (layers are stages, 4 microbatches)."""
    layers: int
    dtype: str
    remat: bool = False

    @property
    def name(self) -> str:
        """How the case is asked for."""
        return "-".join([self.flavour, self.loop, str(self.layers), self.dtype, *["remat"] * self.remat])


CASES = (
    *(Case("linen", "unrolled", n, dtype) for n, dtype in ((4, "float32"), (16, "bfloat16"))),
    *(Case("linen", "scan", n, dtype) for n in (1, 4, 32) for dtype in ("bfloat16", "float32")),
    *(Case("linen", "scan", n, "bfloat16", remat=True) for n in (4, 32)),
    *(Case("nnx", "scan", 4, "bfloat16", remat) for remat in (False, True)),
    *(Case("linen", "pipeline", 4, "bfloat16", remat) for remat in (False, True)),
)


class Block(nn.Module):
    """One layer in Linen."""

    operation: Any
    dtype: Any

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape."""
        settings = {} if self.operation is None else {"dot_general_cls": self.operation}
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype, **settings)
        return dense(WIDTH, name="down")(nn.gelu(dense(4 * WIDTH, name="up")(h)))


class Step(nn.Module):
    """A layer as `nn.scan` wants it."""

    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Return the carry and nothing."""
        return self.block(name="block")(h), None


class Stack(nn.Module):
    """Layers one after the other, in Linen."""

    operation: Any
    case: Case

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape."""
        # the loop keeps XLA from merging what is recomputed with the forward
        block = nn.remat(Block, prevent_cse=self.case.loop == "unrolled") if self.case.remat else Block
        make = functools.partial(block, self.operation, jnp.dtype(self.case.dtype))
        if self.case.loop == "unrolled":
            for i in range(self.case.layers):
                h = make(name=f"layer_{i}")(h)
            return h
        axes, rngs = {"params": 0, OWG: 0}, {"params": True}
        scanned = nn.scan(Step, variable_axes=axes, split_rngs=rngs, length=self.case.layers)
        return scanned(make, name="layers")(h, None)[0]


def linen(case: Case, operation: Any) -> tuple[Callable[..., jax.Array], Any]:
    """Return a loss of variables and input, and the variables."""
    x = example(case)
    if case.loop == "pipeline":
        body = Block(operation, jnp.dtype(case.dtype))
        model: nn.Module = LayerwiseShardablePipelined(
            body=body, num_stages=case.layers, num_microbatches=4, remat=case.remat
        )
    else:
        model = Stack(operation, case)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    return lambda variables, x: mean_square(model.apply(variables, x)), variables


class NnxBlock(nnx.Module):
    """One layer in NNX."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        dense = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.up, self.down = dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Return activations of the same shape."""
        return self.down(nnx.gelu(self.up(h)))


class NnxDirect(nnx.Module):
    """Flax's direct product in NNX, which has none of its own."""

    def __init__(self) -> None:
        for name in ("input", "kernel", "output_grad"):
            setattr(self, f"{name}_scale", owg_nnx.OverwriteWithGradient(jnp.ones((1,))))
            setattr(self, f"{name}_amax_history", owg_nnx.OverwriteWithGradient(jnp.zeros((1024,))))

    def __call__(self, x: jax.Array, k: jax.Array, dims: Any, **kwargs: Any) -> jax.Array:
        """Multiply."""
        names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
        kinds = ("scale", "amax_history")
        state = {f"{a}_{kind}": getattr(self, f"{b}_{kind}")[...] for a, b in names.items() for kind in kinds}
        return fp8_ops.fp8_scaled_dot_general(x, k, dims, preferred_element_type=x.dtype, **state)


def nnx_stack(case: Case, operation: str) -> tuple[Callable[..., jax.Array], Any]:
    """Return a loss of a state and input, and the state."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> NnxBlock:
        block = NnxBlock(rngs, jnp.dtype(case.dtype))
        for layer in (block.up, block.down):
            if operation == PRODUCTS:
                layer.dot_general = multiply_in_float32
            elif operation != PLAIN:
                product = owg_nnx.Fp8DotGeneralOp() if operation == OURS else NnxDirect()
                layer.dot_general = nnx.data(product)
        return block

    def apply(h: jax.Array, block: NnxBlock) -> jax.Array:
        return block(h)

    body = nnx.remat(apply, prevent_cse=False) if case.remat else apply
    run = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    graph, state = nnx.split(make(nnx.Rngs(0).split(case.layers)))
    return lambda state, x: mean_square(run(x, nnx.merge(graph, state))), state


def example(case: Case) -> jax.Array:
    """Return an input: a matrix, or four for a pipeline."""
    shape = (4, ROWS, WIDTH) if case.loop == "pipeline" else (ROWS, WIDTH)
    return jax.random.normal(jax.random.key(0), shape, case.dtype)


def mean_square(y: jax.Array) -> jax.Array:
    """Return the loss."""
    return jnp.square(y.astype(jnp.float32)).mean()


def build(case: Case, operation: str) -> Callable[[], tuple[Callable[[], None], dict[str, float]]]:
    """Return a function that lowers and compiles one step anew: it returns what runs it, and what is known of it."""
    loss, variables = linen(case, LINEN[operation]) if case.flavour == "linen" else nnx_stack(case, operation)
    x, gradient = example(case), jax.grad(loss)
    equations = count_equations(jax.make_jaxpr(gradient)(variables, x).jaxpr)

    def compile_anew() -> tuple[Callable[[], None], dict[str, float]]:
        jax.clear_caches()
        # of the processor, which others on the machine change less than those of the clock
        start = time.process_time()
        lowered = jax.jit(gradient).lower(variables, x)
        middle = time.process_time()
        compiled = lowered.compile()
        end = time.process_time()
        facts = {
            "equations": equations,
            "operations": lowered.as_text().count("stablehlo."),
            "lower": middle - start,
            "compile": end - middle,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        return lambda: jax.block_until_ready(compiled(variables, x)), facts

    return compile_anew


def count_equations(program: Any, seen: set[int] | None = None) -> int:
    """Return the number of equations of a traced program.

    Those of a function that is called several times count once, as JAX lowers it once.
    """
    seen = set() if seen is None else seen
    if id(program) in seen:
        return 0
    seen.add(id(program))
    return len(program.eqns) + sum(count_equations(inner, seen) for one in program.eqns for inner in _programs(one))


def _programs(equation: Any) -> Iterator[Any]:
    def is_program(x: Any) -> bool:
        return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")

    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
    return (getattr(leaf, "jaxpr", leaf) for leaf in leaves if is_program(leaf))


def measure(case: Case, rounds: int, turns: int = TURNS) -> dict[str, Any]:
    """Return one row of the report: what ours takes, divided by what the others take."""
    builders = {name: build(case, name) for name in LINEN}
    made: dict[str, list[Any]] = {name: [] for name in builders}
    for i in range(turns):
        for name in _rotated(i):
            made[name].append(builders[name]())
    times: dict[str, list[float]] = {name: [] for name in builders}
    for i in range(rounds + 2):
        for name in _rotated(i):
            run, _ = made[name][-1]
            start = time.perf_counter()
            run()
            # the first two rounds warm up
            times[name] += [time.perf_counter() - start] * (i > 1)
    # turns are odd, so that the median of counts is one of them
    facts = {
        name: {fact: statistics.median(one[fact] for _, one in each) for fact in each[0][1]}
        for name, each in made.items()
    }
    row: dict[str, Any] = {"case": case.name, "milliseconds": round(statistics.median(times[OURS]) * 1e3, 2)}
    for other in (FLAX, PLAIN):
        row[f"time / {other}"] = round(statistics.median(map(_ratio, times[OURS], times[other])), 2)
    row[f"{PRODUCTS} / {FLAX}"] = round(statistics.median(map(_ratio, times[PRODUCTS], times[FLAX])), 2)
    for fact in ("temporaries", "lower", "compile"):
        row[f"{fact} / {FLAX}"] = round(facts[OURS][fact] / max(facts[FLAX][fact], 1e-9), 2)
    for fact in ("equations", "operations"):
        row |= {fact: facts[OURS][fact], f"{fact}, {FLAX}": facts[FLAX][fact]}
    return row


def _rotated(turn: int) -> list[str]:
    names = list(LINEN)
    return names[turn % len(names) :] + names[: turn % len(names)]


def _ratio(a: float, b: float) -> float:
    return a / b


def table(report: dict[str, Any]) -> str:
    """Return the report as a table of Markdown; what misses its goal is bold."""
    others = [f"{PRODUCTS} / {FLAX}", "equations", "operations", f"operations, {FLAX}"]
    lines = [f"| {' | '.join(['case', *GOALS, *others])} |", "|---|" + "---:|" * (len(GOALS) + len(others))]
    for row in report["rows"]:
        cells = [f"**{row[name]}**" if row[name] > goal else str(row[name]) for name, goal in GOALS.items()]
        cells += [f"{row[name]:,}" if name in row else "-" for name in others]
        lines.append(f"| {' | '.join([row['case'], *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the result, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    options = parser.parse_args()
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    rows = []
    for case in cases:
        rows.append(measure(case, options.rounds))
        print(rows[-1], flush=True)
    versions = {name: version(name) for name in ("jax", "flax", "numpy")}
    device = processor_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    machine = {"device": device, "cores": usable_cores(), "versions": versions}
    report = {"schema": 1, **machine, "rounds": options.rounds, "turns": TURNS, "rows": rows}
    if options.cases is None:
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(table(report) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
