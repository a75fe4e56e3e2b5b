"""`first_order_only`: an identity that refuses to be differentiated, for rules that are derivatives already."""

from typing import Any, NoReturn

import jax

from fp8_common import Fp8UnsupportedError


@jax.custom_jvp
def first_order_only(x: jax.Array) -> jax.Array:
    """Return `x`; differentiating through it raises.

    It stands in the forward and backward rules of the products. Those rules run without being differentiated, unless
    someone differentiates a gradient, and would then get zeros that look like a result.
    """
    return x


def refuse_second_order(primals: Any, tangents: Any, **params: Any) -> NoReturn:
    """Be the rule of forward derivatives of what runs in derivatives alone; `params` are those of a primitive.

    Raises:
        Fp8UnsupportedError: Always.
    """
    raise Fp8UnsupportedError(
        "An FP8 product has first derivatives only, and a gradient of its gradient was asked for. "
        "Compute Hessians and other second derivatives with the layers in bfloat16 or float32."
    )


first_order_only.defjvp(refuse_second_order)
