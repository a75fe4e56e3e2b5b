"""FP8 training for JAX whose overwrite-with-gradient (OWG) state accumulates by MAX everywhere.

Scale and amax history of delayed scaling are parameters whose gradient is their next value. Used several times,
autodiff adds these up; here they are combined by MAX: in scans, under vmap, over devices, over micro-batches.
"""

from fp8_common.plugin import check_version
from fp8_jax_owg.all_gather import fp8_all_gather
from fp8_jax_owg.checks import assert_fp8_collectives, assert_fp8_dots, find_collectives, find_dots
from fp8_jax_owg.differentiate import grad, share_state, value_and_grad
from fp8_jax_owg.dots.casts import in_q, in_qdq, out_dq, out_qdq
from fp8_jax_owg.dots.conv import fp8_conv_general_dilated
from fp8_jax_owg.dots.dot import fp8_dot_general, fp8_einsum
from fp8_jax_owg.dots.operands import Fp8Param
from fp8_jax_owg.dots.ragged import fp8_ragged_dot
from fp8_jax_owg.reports import report
from fp8_jax_owg.scaling import CurrentScaling, DelayedScaling
from fp8_jax_owg.state.cotangents import encode, fm32, fp32_max_grad
from fp8_jax_owg.state.in_loss import UnsharedStateWarning
from fp8_jax_owg.state.pairs import (
    Overwrite,
    init_meta,
    is_owg,
    mark,
    mask_from_hparams,
    merge,
    owg_mask,
    split,
    unmark,
)
from fp8_jax_owg.state.share import gate, read, replicated, share, unshare
from fp8_jax_owg.step import (
    accumulate,
    all_finite,
    apply_updates,
    cast_params,
    clip_by_global_norm,
    init_accumulator,
    map_parameters,
    next_state,
    pmean,
    psum,
    where_step_valid,
)
from fp8_jax_owg.step_log import OwgLog

__version__ = "0.1.0"
check_version("fp8-jax-owg", __version__)

__all__ = [
    "CurrentScaling",
    "DelayedScaling",
    "Fp8Param",
    "Overwrite",
    "OwgLog",
    "UnsharedStateWarning",
    "accumulate",
    "all_finite",
    "apply_updates",
    "assert_fp8_collectives",
    "assert_fp8_dots",
    "cast_params",
    "clip_by_global_norm",
    "encode",
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
    "grad",
    "in_q",
    "in_qdq",
    "init_accumulator",
    "init_meta",
    "is_owg",
    "map_parameters",
    "mark",
    "mask_from_hparams",
    "merge",
    "next_state",
    "out_dq",
    "out_qdq",
    "owg_mask",
    "pmean",
    "psum",
    "read",
    "replicated",
    "report",
    "share",
    "share_state",
    "split",
    "unmark",
    "unshare",
    "value_and_grad",
    "where_step_valid",
]
