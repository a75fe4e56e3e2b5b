"""The picture of the JAX guide; `python -m benchmarks.plot_owg_accumulation` draws it again.

Every number is computed here: above the first step of a layer that sees 1, 5, 3, 2, below its scale over more steps.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib.figure import Figure

import fp8_jax_owg as owg
from fp8_jax_owg import fp8_dot_general, init_meta
from fp8_jax_owg.observation import resolve

PICTURE = Path(__file__).resolve().parents[1] / "docs/assets/owg-accumulation.svg"
SEEN = jnp.float32([1, 5, 3, 2])
SCALING = owg.DelayedScaling(amax_history_length=4)
STEPS = 8


def step(meta: dict[str, jax.Array], how: str) -> dict[str, jax.Array]:
    """Return the state after one step: four iterations with inputs of amax 1, 5, 3, 2."""

    def use(x: jax.Array, meta: dict[str, jax.Array]) -> jax.Array:
        dims = (((1,), (0,)), ((), ()))
        return fp8_dot_general(jnp.full((2, 2), x), jnp.eye(2), dims, meta=meta, scaling=SCALING).sum()

    def added(meta: dict[str, jax.Array]) -> jax.Array:
        return jax.lax.scan(lambda total, x: (total + use(x, meta), None), jnp.float32(0), SEEN)[0]

    def greatest(meta: dict[str, jax.Array]) -> jax.Array:
        return owg.scan(lambda total, x, meta: (total + use(x, meta), None), jnp.float32(0), SEEN, owg=meta)[0]

    gradient = jax.grad(added if how == "SUM" else greatest)(meta)
    return jax.tree.map(resolve, meta, gradient)


def study() -> dict[str, tuple[float, list[float]]]:
    """Return, for each way, the amax that the first step records and the scale after each step."""
    found = {}
    for how in ("SUM", "MAX"):
        meta, scales, recorded = init_meta(SCALING), [], 0.0
        run = jax.jit(lambda meta, how=how: step(meta, how))
        for number in range(STEPS):
            meta = run(meta)
            scales.append(float(meta["input_scale"][0]))
            recorded = recorded if number else float(meta["input_amax_history"][0])
        found[how] = (recorded, scales)
    return found


def figure_of(found: dict[str, tuple[float, list[float]]]) -> Figure:
    """Return both panels, one below the other."""
    figure = Figure(figsize=(4.6, 6), layout="constrained")
    first, later = figure.subplots(2, 1)
    first.bar(range(1, 5), SEEN, color="0.75")
    for (how, (recorded, scales)), color in zip(found.items(), ("tab:red", "tab:green"), strict=True):
        first.axhline(recorded, color=color)
        first.text(0.5, recorded + 0.15, f"{how} records {recorded:g}", color=color)
        later.plot(range(1, STEPS + 1), scales, color=color, marker="o", label=how)
    first.set(xlabel="iteration", ylabel="amax of the input", xticks=range(1, 5), ylim=(0, 12.5))
    later.set(xlabel="step", ylabel="stored scale of the input", yscale="log")
    later.legend()
    return figure


def main() -> None:
    """Run both and draw."""
    mpl.rcParams.update({"svg.hashsalt": "owg", "svg.fonttype": "none", "font.size": 10})
    figure_of(study()).savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
