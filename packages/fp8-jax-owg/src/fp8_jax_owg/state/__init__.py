"""Delayed-scaling state inside of loops, branches and devices.

The other modules here are internal: stored pairs (`pairs`), live leaves (`in_loss`), and cotangents.
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
