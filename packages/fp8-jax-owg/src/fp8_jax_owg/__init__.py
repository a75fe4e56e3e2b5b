"""FP8 training for JAX whose overwrite-with-gradient (OWG) state accumulates by MAX everywhere.

Scale and amax history of delayed scaling are parameters whose gradient is their next value. Used several times,
autodiff adds these up; here they are combined by MAX: in scans, under vmap, over devices, over micro-batches.
"""

from fp8_common.plugin import check_version
from fp8_jax_owg._casts import in_q, in_qdq, out_dq, out_qdq
from fp8_jax_owg._checks import (
    Collective,
    Dot,
    assert_fp8_collectives,
    assert_fp8_dots,
    find_collectives,
    find_dots,
)
from fp8_jax_owg._combine import (
    accumulate,
    apply_updates,
    init_accumulator,
    pmean,
    psum,
    where_step_valid,
)
from fp8_jax_owg._conv import fp8_conv_general_dilated
from fp8_jax_owg._dot import fp8_dot_general
from fp8_jax_owg._dtype import fm32, fp32_max_grad
from fp8_jax_owg._einsum import fp8_einsum
from fp8_jax_owg._gather import fp8_all_gather
from fp8_jax_owg._marker import Overwrite, is_owg, mark, merge, owg_mask, split, unmark
from fp8_jax_owg._meta import init_meta
from fp8_jax_owg._mode import get_mode, use_mode
from fp8_jax_owg._norms import all_finite, clip_by_global_norm, map_parameters
from fp8_jax_owg._parameter import Fp8Param
from fp8_jax_owg._ragged import fp8_ragged_dot
from fp8_jax_owg._report import OwgReport, TensorReport, report
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling
from fp8_jax_owg._sharing import fan_out, gate, read, replicated, scan, share
from fp8_jax_owg._transforms import cast_params, grad, value_and_grad

__version__ = "0.1.0"
check_version("fp8-jax-owg", __version__)

__all__ = [
    "Collective",
    "CurrentScaling",
    "DelayedScaling",
    "Dot",
    "Fp8Param",
    "Overwrite",
    "OwgReport",
    "TensorReport",
    "accumulate",
    "all_finite",
    "apply_updates",
    "assert_fp8_collectives",
    "assert_fp8_dots",
    "cast_params",
    "clip_by_global_norm",
    "fan_out",
    "find_collectives",
    "find_dots",
    "fm32",
    "fp8_all_gather",
    "fp8_conv_general_dilated",
    "fp8_dot_general",
    "fp8_einsum",
    "fp8_ragged_dot",
    "fp32_max_grad",
    "gate",
    "get_mode",
    "grad",
    "in_q",
    "in_qdq",
    "init_accumulator",
    "init_meta",
    "is_owg",
    "map_parameters",
    "mark",
    "merge",
    "out_dq",
    "out_qdq",
    "owg_mask",
    "pmean",
    "psum",
    "read",
    "replicated",
    "report",
    "scan",
    "share",
    "split",
    "unmark",
    "use_mode",
    "value_and_grad",
    "where_step_valid",
]
