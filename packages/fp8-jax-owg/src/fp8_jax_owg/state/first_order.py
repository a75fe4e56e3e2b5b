"""What says in one sentence that FP8 matmuls have no second and no forward-mode derivatives."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from fp8_common import Fp8UnsupportedError


@jax.custom_jvp
def first_order_only(x: jax.Array) -> jax.Array:
    """Return `x`; differentiating through it raises.

    It stands in the forward and backward rules of matmuls. Those rules run without being differentiated, unless
    someone differentiates a gradient, and would then get zeros that look like a result.
    """
    return x


def refuse_second_order(primals: Any, tangents: Any, **params: Any) -> NoReturn:
    """Be the rule of forward derivatives of what runs in derivatives alone; `params` are those of a primitive.

    Raises:
        Fp8UnsupportedError: Always.
    """
    raise Fp8UnsupportedError(
        "An FP8 matmul has first derivatives only, and a gradient of its gradient was asked for. "
        "Compute Hessians and other second derivatives with the layers in bfloat16 or float32."
    )


first_order_only.defjvp(refuse_second_order)


@contextlib.contextmanager
def reverse_mode_only() -> Iterator[None]:
    """Say it in a sentence if JAX asks what is called here for a forward-mode derivative.

    Raises:
        Fp8UnsupportedError: It did.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        raise Fp8UnsupportedError(
            "An FP8 matmul has reverse-mode derivatives only, and jax.jvp, jax.jacfwd or jax.linearize was asked for. "
            "Use jax.vjp, jax.grad or jax.jacrev, or compute forward-mode derivatives with the layers in bfloat16."
        ) from error
