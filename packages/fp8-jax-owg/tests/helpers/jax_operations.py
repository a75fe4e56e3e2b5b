"""What a loss may do to its variables: operations on each leaf that are right on live state, and others."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

KEY = jax.random.key(0)


def floating(p):
    return jnp.issubdtype(p.dtype, jnp.floating)


@jax.custom_jvp
def custom_jvp_product(p):
    return p * 1.0


custom_jvp_product.defjvp(lambda p, t: (p[0] * 1.0, t[0] * 1.0))


def custom_vjp(backward):
    function = jax.custom_vjp(lambda p: p)
    function.defvjp(lambda p: (p, None), lambda _, g: (backward(g),))
    return function


def pure_callback(p):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(p.shape, p.dtype), p)


def of_vectors(function):
    return lambda p: function(p) if p.ndim == 1 else p


# Right on state: as if parameters alone were changed.
RIGHT = {
    "where(True, p, zeros_like(p))": lambda p: jnp.where(True, p, jnp.zeros_like(p)),
    "where(False, q, p) of two": lambda p: jnp.where(False, jnp.zeros_like(p), p),
    "lax.select": lambda p: lax.select(jnp.ones(p.shape, bool), p, jnp.zeros_like(p)),
    "cast to bf16 and back, floating only": lambda p: p.astype(jnp.bfloat16).astype(jnp.float32) if floating(p) else p,
    "noise, floating only": lambda p: p + 0.01 if floating(p) else p,
    "roll 1 over one": lambda p: jnp.roll(p, 1) if p.ndim == 1 and p.size == 1 else p,
    "flip twice": lambda p: jnp.flip(jnp.flip(p)),
    "concat, split": lambda p: jnp.split(jnp.concatenate([p, p]), 2)[1],
    "stack [1]": lambda p: jnp.stack([p, p])[1],
    "expand, squeeze": lambda p: p[None][0],
    "take of mode clip": lambda p: jnp.take(jnp.stack([p, p]), 0, axis=0, mode="clip"),
    "gather": lambda p: jnp.stack([p, p])[jnp.array([0])][0],
    "reshape": lambda p: p.reshape(-1).reshape(p.shape),
    "broadcast_to [1]": lambda p: jnp.broadcast_to(p, (3, *p.shape))[1],
    "tile": of_vectors(lambda p: jnp.tile(p, 2)[..., : p.shape[-1]]),
    "jvp identity": lambda p: jax.jvp(lambda q: q, (p,), (p,))[1],
    "stop_gradient": lax.stop_gradient,
    "asarray": jnp.asarray,
    "roll(p, 0)": lambda p: jnp.roll(p, 0),
    "custom_vjp identity": custom_vjp(lambda g: g),
    "optimization_barrier": lax.optimization_barrier,
    "nan_to_num": jnp.nan_to_num,  # changes floating arrays alone
}
# Refused while tracing.
REFUSED = {
    "where(mask, p, 0)": lambda p: jnp.where(jnp.zeros(p.shape, bool), p, 0.0),
    "where(True, p, 0)": lambda p: jnp.where(True, p, 0.0),
    "dropconnect bernoulli p=.5": lambda p: jnp.where(jax.random.bernoulli(KEY, 0.5, p.shape), p, 0.0),
    "p * mask": lambda p: p * jax.random.bernoulli(KEY, 0.5, p.shape).astype(jnp.float32),
    "ones_like": jnp.ones_like,
    "full_like 3": lambda p: jnp.full_like(p, 3),
    "lax.add(p, p)": lambda p: lax.add(p, p),
    "lax.max(p, p)": lambda p: lax.max(p, p),
    "lax.mul": lambda p: lax.mul(p, p),
    "lax.clamp": lambda p: lax.clamp(p, p, p),
    "lax.sort": lax.sort,
    "lax.cumsum": lax.cumsum,
    "lax.reduce_precision": lambda p: lax.reduce_precision(p, 8, 7),
    "lax.exp": lax.exp,
    "bitcast f32": lambda p: lax.bitcast_convert_type(p, jnp.float32),
    "bitcast i32 and back": lambda p: lax.bitcast_convert_type(lax.bitcast_convert_type(p, jnp.int32) + 1, jnp.float32),
    "view int": lambda p: p.view(jnp.int32).view(jnp.float32),
    "astype int32 and back": lambda p: p.astype(jnp.int32).astype(jnp.float32),
    "norm clip": lambda p: p / jnp.maximum(1, jnp.linalg.norm(p)),
    "p.at[0].set(0.)": lambda p: p.at[0].set(0.0),
    "p.at[0].multiply(2)": lambda p: p.at[0].multiply(2),
    "take 0": lambda p: jnp.take(jnp.stack([p, p]), 0, axis=0),
    "isfinite guard": lambda p: jnp.where(jnp.isfinite(p), p, 0),
    "softplus": jax.nn.softplus,
    "abs": jnp.abs,
    "pure_callback": pure_callback,
    "jit noise": jax.jit(lambda p: p + 0.01),
    "custom_vjp doubling the cotangent": custom_vjp(lambda g: g + g),
    "grad of sum": lambda p: jax.grad(lambda q: q.sum())(p) + p,
    "lerp EMA": lambda p: 0.9 * p + 0.1 * lax.stop_gradient(p),
    "maximum(p, 1e4)": lambda p: jnp.maximum(p, 1e4),
    "maximum(p, 0)": lambda p: jnp.maximum(p, 0),
    "relu(p)": jax.nn.relu,
    "clip(p, -1, 1)": lambda p: jnp.clip(p, -1, 1),
    "clip(p, -.01, .01)": lambda p: jnp.clip(p, -0.01, 0.01),
    "clip(p, -1e3, 1e3)": lambda p: jnp.clip(p, -1e3, 1e3),
    "minimum(p, .001)": lambda p: jnp.minimum(p, 0.001),
    "p * 1.0": lambda p: p * 1.0,
    "p * 0.5": lambda p: p * 0.5,
    "p + 0": lambda p: p + 0.0,
    "-(-p)": lambda p: -jnp.negative(p),
    "p / 2 * 2": lambda p: p / 2 * 2,
    "straight-through bf16": lambda p: p + lax.stop_gradient(p.astype(jnp.bfloat16).astype(p.dtype) - p),
    "astype bf16 and back": lambda p: p.astype(jnp.bfloat16).astype(jnp.float32),
    "astype f32": lambda p: p.astype(jnp.float32),
    "p + 0.01 * normal": lambda p: p + 0.01 * jax.random.normal(KEY, p.shape),
    "jnp.sort": of_vectors(jnp.sort),
    "jnp.cumsum": of_vectors(jnp.cumsum),
    "pad, slice": lambda p: jnp.pad(p, [(0, 1)] * p.ndim)[tuple(slice(0, n) for n in p.shape)],
    "einsum identity": of_vectors(lambda p: jnp.einsum("i,ij->j", p, jnp.eye(p.shape[0]))),
    "custom_jvp product": custom_jvp_product,
    "custom_vjp that scales the gradient": custom_vjp(lambda g: g * 0.5),
}
# Zeros in the place of state, which autodiff makes too: the loss is NaN.
ZEROS = {
    "zeros_like(p)": jnp.zeros_like,
    "where(mask, p, zeros_like(p)), mask off": lambda p: jnp.where(False, p, jnp.zeros_like(p)),
    "where(bernoulli, p, zeros_like(p))": lambda p: jnp.where(
        jax.random.bernoulli(KEY, 0.5, p.shape), p, jnp.zeros_like(p)
    ),
    "dynamic_update_slice zeros": lambda p: lax.dynamic_update_slice(p, jnp.zeros_like(p), (0,) * p.ndim),
}
# Python asks for values while JAX traces.
IN_PYTHON = {
    "float(p) in Python": lambda p: float(p.ravel()[0]) + p,
    "np.asarray": lambda p: jnp.asarray(np.asarray(p)),
}
CHANGED = ("cast to bf16 and back, floating only", "noise, floating only", "stop_gradient")
"""Which of those that are right give parameters other values or gradients."""
