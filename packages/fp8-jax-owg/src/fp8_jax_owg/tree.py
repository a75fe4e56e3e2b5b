"""Functions on trees of variables: find and split state, map parameters."""

from fp8_jax_owg.state.pairs import Overwrite, is_owg, mark, mask_from_hparams, merge, owg_mask, split, unmark
from fp8_jax_owg.step import (
    all_finite,
    cast_params,
    clip_by_global_norm,
    init_accumulator,
    map_parameters,
    next_state,
    where_step_valid,
)

__all__ = [
    "Overwrite",
    "all_finite",
    "cast_params",
    "clip_by_global_norm",
    "init_accumulator",
    "is_owg",
    "map_parameters",
    "mark",
    "mask_from_hparams",
    "merge",
    "next_state",
    "owg_mask",
    "split",
    "unmark",
    "where_step_valid",
]
