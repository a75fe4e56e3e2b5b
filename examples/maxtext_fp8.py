"""Train with MaxText in FP8: its own `train.main`, with scales that stay right in scans and pipelines.

    python maxtext_fp8.py base.yml run_name=fp8 quantization=fp8 [any other setting of MaxText]

For maxtext 0.2.5. Two things are replaced: the matmuls of `quantization=fp8`, and the gradient that its training step
takes. Names and shapes of the state are those of MaxText's own `fp8`, so checkpoints load either way.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
from maxtext.layers import quantizations
from maxtext.trainers.pre_train import train

import fp8_jax_owg as owg
import fp8_jax_owg.nnx
from fp8_jax_owg.linen import Fp8DirectDotGeneralOp, Fp8Einsum


def value_and_grad(loss: Callable[..., Any], argnums: tuple[int, ...], has_aux: bool) -> Callable[..., Any]:
    """`jax.value_and_grad` as MaxText's training step calls it: the gradient of the state is its next value."""
    both = owg.value_and_grad(loss, argnums, has_aux)

    def run(*args: Any) -> Any:
        value, gradients = both(*args)
        return value, owg.tree.next_state(tuple(args[number] for number in argnums), gradients)

    return run


def install(scaling: owg.DelayedScaling = owg.DelayedScaling()) -> None:  # noqa: B008 (frozen)
    """Let `quantization=fp8` of this process be that of fp8_jax_owg."""
    make = functools.partial(Fp8DirectDotGeneralOp, scaling=scaling)
    quantizations.Fp8Quantization.dot_general_cls = lambda self, mesh_axes=(): make
    quantizations.Fp8Quantization.einsum = lambda self, dtype=None: Fp8Einsum(scaling=scaling)
    train.jax = types.SimpleNamespace(**{**vars(jax), "value_and_grad": value_and_grad})


if __name__ == "__main__":
    install()
    train.main(sys.argv)
