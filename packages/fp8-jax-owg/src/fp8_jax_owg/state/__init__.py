"""Delayed-scaling state in loops, in branches and on devices.

The modules are internal: `pairs` finds stored state in trees, `in_loss` computes live leaves and the next state,
`cotangents` defines the dtypes that combine by MAX, `share` converts state to and from these dtypes, and
`jaxpr_interpreter` differentiates losses that JAX cannot.
"""

from fp8_jax_owg.state.cotangents import encode
from fp8_jax_owg.state.in_loss import UnsharedStateWarning
from fp8_jax_owg.state.share import gate, read, replicated, share, share_state, unshare

__all__ = [
    "UnsharedStateWarning",
    "encode",
    "gate",
    "read",
    "replicated",
    "share",
    "share_state",
    "unshare",
]
