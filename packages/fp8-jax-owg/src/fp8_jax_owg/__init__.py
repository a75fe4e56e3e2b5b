"""FP8 training for JAX whose overwrite-with-gradient (OWG) state combines by MAX everywhere.

With delayed scaling, each step overwrites the scale and the amax history of a tensor with values that come from the
gradient. If a layer runs several times in a step, autodiff adds up what its calls observe. This package combines the
observations by MAX instead: in scans, under vmap, over devices and over micro-batches.

    >>> import jax.numpy as jnp
    >>> import fp8_jax_owg as owg
    >>> variables = {"kernel": jnp.ones((16, 16)), "fp8": owg.init_meta(owg.DelayedScaling())}
    >>> def loss(variables, x):
    ...     y = owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"])
    ...     return (y**2).mean()
    >>> value, gradients = owg.value_and_grad(loss)(variables, jnp.ones((4, 16)))
    >>> updates = {**gradients, "kernel": -0.1 * gradients["kernel"]}
    >>> variables = owg.apply_updates(variables, updates)
    >>> float(value), float(variables["fp8"]["input_amax_history"][0])
    (256.0, 1.0)

Layers for Flax are in `linen` and `nnx`, wrappers of optax in `optimizers`, pipelines of any tree in `pipeline`, and
conversion of checkpoints in `checkpoint`. `tree` splits and maps variables, `state` shares state in loops and on
devices, `testing` checks that programs run in FP8, and `flax_casts` holds casts under flax's names.
"""

from fp8_common.plugin import check_version
from fp8_jax_owg import flax_casts, state, testing, tree
from fp8_jax_owg.all_gather import fp8_all_gather
from fp8_jax_owg.differentiate import grad, value_and_grad
from fp8_jax_owg.dots.conv import fp8_conv_general_dilated
from fp8_jax_owg.dots.dot import fp8_dot_general, fp8_einsum
from fp8_jax_owg.dots.operands import Fp8Param
from fp8_jax_owg.dots.ragged import fp8_ragged_dot
from fp8_jax_owg.reports import report
from fp8_jax_owg.scaling import CurrentScaling, DelayedScaling
from fp8_jax_owg.state.pairs import init_meta
from fp8_jax_owg.step import accumulate, apply_updates, pmean, psum
from fp8_jax_owg.step_log import OwgLog

__version__ = "0.1.0"
check_version("fp8-jax-owg", __version__)

__all__ = [
    "CurrentScaling",
    "DelayedScaling",
    "Fp8Param",
    "OwgLog",
    "accumulate",
    "apply_updates",
    "flax_casts",
    "fp8_all_gather",
    "fp8_conv_general_dilated",
    "fp8_dot_general",
    "fp8_einsum",
    "fp8_ragged_dot",
    "grad",
    "init_meta",
    "pmean",
    "psum",
    "report",
    "state",
    "testing",
    "tree",
    "value_and_grad",
]
