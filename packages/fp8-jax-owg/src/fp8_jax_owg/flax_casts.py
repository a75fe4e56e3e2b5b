"""Casts and dtypes under the names of `flax.linen.fp8_ops`."""

from fp8_jax_owg.dots.casts import in_q, in_qdq, out_dq, out_qdq
from fp8_jax_owg.state.cotangents import fm32, fp32_max_grad

__all__ = [
    "fm32",
    "fp32_max_grad",
    "in_q",
    "in_qdq",
    "out_dq",
    "out_qdq",
]
