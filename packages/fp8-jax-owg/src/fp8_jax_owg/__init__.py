"""FP8 training for JAX whose overwrite-with-gradient (OWG) state accumulates by MAX everywhere.

Scale and amax history of delayed scaling are parameters whose gradient is their next value. Used several times,
autodiff adds these up; here they are combined by MAX: in scans, under vmap, over devices, over micro-batches.
"""

from fp8_common.plugins import check_version
from fp8_jax_owg.boundary import fan_out, gate, read, replicated, scan, share
from fp8_jax_owg.combine import (
    accumulate,
    apply_updates,
    init_accumulator,
    pmean,
    psum,
    where_step_valid,
)
from fp8_jax_owg.dtype import fm32, fp32_max_grad
from fp8_jax_owg.marker import Overwrite, is_owg, merge, owg_mask, split
from fp8_jax_owg.mode import get_mode, use_mode
from fp8_jax_owg.norms import clip_by_global_norm, global_norm, scale_gradients
from fp8_jax_owg.transforms import cast_params, grad, value_and_grad

__version__ = "0.1.0"
check_version("fp8-jax-owg", __version__)

__all__ = [
    "Overwrite",
    "accumulate",
    "apply_updates",
    "cast_params",
    "clip_by_global_norm",
    "fan_out",
    "fm32",
    "fp32_max_grad",
    "gate",
    "get_mode",
    "global_norm",
    "grad",
    "init_accumulator",
    "is_owg",
    "merge",
    "owg_mask",
    "pmean",
    "psum",
    "read",
    "replicated",
    "scale_gradients",
    "scan",
    "share",
    "split",
    "use_mode",
    "value_and_grad",
    "where_step_valid",
]
