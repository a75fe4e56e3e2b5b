"""`trained_with_state`: an identity of kernels that refuses to be trained while the FP8 state beside them is not."""

import functools
from typing import Any

import jax

from fp8_common import Fp8Error


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def trained_with_state(where: str, kernel: Any, state: Any) -> Any:
    """Return the kernel.

    Args:
        where: The name of the layer.
        kernel: An array, or a gathered kernel.
        state: The leaves of its product.

    Raises:
        Fp8Error: The kernel is differentiated and no leaf of the state is: scales would never move.
    """
    return kernel


def _forward(where: str, kernel: Any, state: Any) -> tuple[Any, None]:
    # each leaf tells beside its value whether it has a tangent
    trained, observed = (_any_tangent(tree) for tree in (kernel, state))
    if trained and not observed:
        raise Fp8Error(
            f"The kernel of {where} is trained and its FP8 state is not, so its scales would stay as they are for "
            "ever. Differentiate both: the whole variables of Linen with fp8_jax_owg.value_and_grad, a model of NNX "
            "with fp8_jax_owg.nnx.value_and_grad, and update with the TrainState or the nnx.Optimizer. For a state "
            "that is meant to stay, call fp8_jax_owg.fp8_dot_general with it."
        )
    return jax.tree.map(lambda leaf: leaf.value, kernel, is_leaf=_has_flag), None


def _has_flag(node: Any) -> bool:
    # With symbolic_zeros=True JAX gives this rule, for each leaf, an object with `value` and `perturbed`.
    return hasattr(node, "perturbed")


def _any_tangent(tree: Any) -> bool:
    return any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=_has_flag))


def _backward(where: str, _: None, g: Any) -> tuple[Any, None]:
    zeros = jax.custom_derivatives.SymbolicZero
    # Cotangents that nobody computed arrive as objects, not arrays. None is how a rule says zero.
    return jax.tree.map(lambda x: None if isinstance(x, zeros) else x, g, is_leaf=lambda x: isinstance(x, zeros)), None


trained_with_state.defvjp(_forward, _backward, symbolic_zeros=True)
