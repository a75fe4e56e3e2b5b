"""FP8 training for JAX whose overwrite-with-gradient (OWG) state accumulates by MAX everywhere.

Scale and amax history of delayed scaling are parameters whose gradient is their next value. Used several times,
autodiff adds these up; here they are combined by MAX: in scans, under vmap, over devices, over micro-batches.
"""

from fp8_common.plugins import check_version
from fp8_jax_owg.boundary import fan_out, gate, read, replicated, scan, share
from fp8_jax_owg.dtype import fm32, fp32_max_grad
from fp8_jax_owg.mode import get_mode, use_mode

__version__ = "0.1.0"
check_version("fp8-jax-owg", __version__)

__all__ = [
    "fan_out",
    "fm32",
    "fp32_max_grad",
    "gate",
    "get_mode",
    "read",
    "replicated",
    "scan",
    "share",
    "use_mode",
]
