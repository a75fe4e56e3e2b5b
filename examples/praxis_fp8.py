"""Train pipelines of praxis in FP8: praxis' own layers, and scales that stay right over micro-batches.

    python -m examples.praxis_fp8 [--steps 2]

praxis is not on PyPI for this JAX: put a checkout on PYTHONPATH, or call `nox -s praxis -- CHECKOUT`. One thing of
praxis is replaced, the einsum of its FP8 layers. Variables are declared by its `WeightHParams`, its pipeline computes
from them which ones are overwritten, and `model.apply` is called as before.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from praxis import base_layer, pax_fiddle
from praxis.layers import linears, pipeline
from praxis.layers.injection import fp8_nvidia_gpu

import fp8_jax_owg as owg
from fp8_jax_owg.optimizers import bypass_owg

SCALING = owg.DelayedScaling(amax_history_length=3)
STAGES, ROUNDS, WIDTH = 2, 2, 4
AMAX = (1, 5, 3, 2)
"""The greatest value of each micro-batch; added up, 11."""
FAULT = (
    "If this is an assertion of base_layer.py about tuples: in praxis, circular pipelines cannot be initialised. Let "
    "its BoxedParam.remove_axis store tuple(updated_dims_mapping), twice."
)
Tree = Any


class Fp8Einsum(fp8_nvidia_gpu.Fp8EinsumOp):
    """The FP8 einsum of praxis, with its variables, computed by fp8_jax_owg."""

    def __call__(self, equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return the einsum of activations and a kernel."""
        leaves = itertools.product(("input", "kernel", "output_grad"), ("scale", "amax_history"))
        meta = {name: getattr(self.theta, name) for name in map("_".join, leaves)}
        return owg.fp8_einsum(equation, x, kernel, meta=meta, scaling=SCALING)


def build(*, circular: bool, einsum: type = Fp8Einsum, **options: Any) -> base_layer.BaseLayer:
    """Return a pipeline of linear layers, whose micro-batches go round several times if it is `circular`."""
    op = pax_fiddle.Config(einsum, name="einsum", amax_history_length=SCALING.amax_history_length)
    layer = pax_fiddle.Config(linears.Linear, name="layer", einsum_tpl=op, input_dims=WIDTH, output_dims=WIDTH)
    chosen = {"name": "pipe", "num_stages": STAGES, "num_microbatches": len(AMAX), "single_stage_body": layer} | options
    kind = pipeline.LayerwiseShardablePipelined
    if circular:
        kind, chosen["circular_repeat"] = pipeline.CircularLayerwiseShardablePipelined, ROUNDS
    return base_layer.instantiate(pax_fiddle.Config(kind, **chosen))


def init(model: base_layer.BaseLayer, x: jax.Array) -> Tree:
    """Return variables with kernels that keep the amax of what they multiply."""
    try:
        variables = jax.jit(model.init)(jax.random.key(0), x)
    except AssertionError as error:
        error.add_note(FAULT)
        raise
    kernels = variables["params"]["body"]
    kernels["w"] = jnp.broadcast_to((jnp.eye(WIDTH) + jnp.eye(WIDTH)[::-1]) / 2, kernels["w"].shape)
    return variables


def batch() -> jax.Array:
    """Return a batch of two rows for each micro-batch; row r is of micro-batch r modulo their number."""
    return jnp.tile(jnp.float32(AMAX), 2)[:, None] * jnp.ones(WIDTH)


def twin(variables: Tree, x: jax.Array) -> jax.Array:
    """Return what the layers make of the whole batch, one after the other: each uses its state once."""
    body = variables["params"]["body"]
    for place in np.ndindex(body["w"].shape[:-2]):
        meta = {name: leaf[place] for name, leaf in body["einsum"].items()}
        x = owg.fp8_einsum("bi,io->bo", x, body["w"][place], meta=meta, scaling=SCALING)
    return x


def train(apply: Callable[[Tree, jax.Array], jax.Array], variables: Tree, x: jax.Array, steps: int) -> tuple[Any, Tree]:
    """Return the loss and the newest amax of inputs, after each step, and the last variables."""
    optimizer = bypass_owg(optax.sgd(1e-3))

    @jax.jit
    def step(variables: Tree, moments: Tree) -> tuple[jax.Array, Tree, Tree]:
        loss, gradients = owg.value_and_grad(lambda variables: (apply(variables, x) ** 2).mean())(variables)
        updates, moments = optimizer.update(gradients, moments, variables)
        return loss, owg.apply_updates(variables, updates), moments

    moments, log = optimizer.init(variables), []
    for _ in range(steps):
        loss, variables, moments = step(variables, moments)
        log.append((float(loss), variables["params"]["body"]["einsum"]["input_amax_history"][..., 0].ravel().tolist()))
    return log, variables


def main() -> None:
    """Train both pipelines and their twins, and print what they record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    steps, x = parser.parse_args().steps, batch()
    for circular in (False, True):
        model = build(circular=circular)
        variables = init(model, x)
        for name, apply in ((type(model).__name__, model.apply), ("its layers one by one", twin)):
            for number, (loss, amax) in enumerate(train(apply, variables, x, steps)[0], 1):
                print(f"{name}, step {number}: loss {loss:.6f}, amax {[round(one, 4) for one in amax]}", flush=True)


if __name__ == "__main__":
    main()
