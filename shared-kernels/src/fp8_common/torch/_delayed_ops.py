"""Delayed scaling on tensors: the keys of what was observed, and the step of all histories of a model.

On a GPU `roll_histories` is one launch for all tensors that share a rule.
"""

from collections.abc import Sequence
from functools import cache

import torch

from fp8_common._amax import INF_KEY
from fp8_common._formats import get_data_format
from fp8_common._policy import ScalePolicy
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _capture as capture
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._amax import float_key, key_to_float
from fp8_common.torch._history import reduce_history, update_history
from fp8_common.torch._ops import NAMESPACE, policy_key, policy_of_key
from fp8_common.torch._scaling import divide

__all__ = ["UNOBSERVED", "delayed_update", "observed_key", "reduce_history", "roll_histories", "scales_from_keys"]

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

UNOBSERVED = -1
"""Key of an operand that was not observed; below every amax, so that MAX ignores it."""


def observed_key(amax: torch.Tensor) -> torch.Tensor:
    """Return the int32 keys of float32 `amax`, UNOBSERVED where it is infinite or NaN: that is not recorded."""
    key = float_key(amax)
    # Marked before ranks are combined by MAX: an infinity on one rank must not hide what the others observed.
    return torch.where(key >= INF_KEY, UNOBSERVED, key)


def roll_histories(
    history: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor, casts: Sequence[CastRecipe]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histories and scales after a step in which every operand was observed.

    Args:
        history: float32 [L, T], slot 0 the newest.
        keys: int32 [T]: what the step observed; entries below 0 count as 0.
        scale: float32 [T]: the scales into FP8 of the step.
        casts: T casts that share one policy.
    """
    formats = ",".join(cast.format for cast in casts)
    # UNOBSERVED has the bits of a NaN.
    amax = key_to_float(keys.clamp(min=0))
    rolled, following, _ = delayed_update(history, amax, scale, formats, policy_key(casts[0].policy))
    return rolled, following


def scales_from_keys(keys: torch.Tensor, casts: Sequence[CastRecipe]) -> torch.Tensor:
    """Return the float32 scales [T] that dynamic scaling gives operands of these amax.

    Args:
        keys: int32 [T]; entries below 0 count as 0.
        casts: T casts that share one policy.
    """
    return _scales_by_format(key_to_float(keys.clamp(min=0)), tuple(cast.format for cast in casts), casts[0].policy)


@torch.library.custom_op(f"{NAMESPACE}::delayed_update", mutates_args=())
def delayed_update(history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, formats: str, policy: str) -> Step:
    """Return the rolled history, the next scales and their reciprocals.

    Args:
        history: float32 [L, T], slot 0 the newest.
        amax: float32 [T], observed in this step; infinite and NaN ones are not recorded.
        scale: float32 [T]: the scales into FP8 of this step.
        formats: The names of the T formats, with commas between.
        policy: `fp8_common.torch._ops.policy_key` of the rule that all share.
    """
    names, rule = tuple(formats.split(",")), policy_of_key(policy)
    # All or none: one launch handles every tensor, whatever its format.
    if all(triton_backend.applies(amax, name, rule) for name in set(names)):
        return triton_backend.delayed_update(history, amax, scale, _numerators(names, rule, amax.device), rule)
    window, largest = update_history(history, amax, rule.algo)
    result = _scales_by_format(largest, names, rule, prev=scale)
    return window, result, divide(1.0, result)


@delayed_update.register_fake
def _(history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, formats: str, policy: str) -> Step:
    return history.new_empty(history.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


def _scales_by_format(
    amax: torch.Tensor, names: tuple[str, ...], policy: ScalePolicy, prev: torch.Tensor | None = None
) -> torch.Tensor:
    # The scale rule depends on the format, so every format computes all scales and keeps its own; there are two or so.
    first, *others = dict.fromkeys(names)
    result = dispatch.scale_from_amax(amax, get_data_format(first), policy, prev=prev)
    for name in others:
        own = dispatch.scale_from_amax(amax, get_data_format(name), policy, prev=prev)
        result = torch.where(_has_format(names, name, amax.device), own, result)
    return result


@cache
def _numerators(names: tuple[str, ...], policy: ScalePolicy, device: torch.device) -> torch.Tensor:
    """Return the float32 [T] numerators of the scales; sent to the device once."""
    # Cached: a transfer in every step would stall the host, and cannot be captured in a CUDA graph. Without a limit: a
    # graph points to it, and there is one for each list of formats, which is a few bytes for each operand of a model.
    capture.refuse(device, "a list of formats")
    return torch.tensor(
        [triton_backend.plans().scale_rule(name, policy)[0] for name in names], dtype=torch.float32, device=device
    )


@cache
def _has_format(names: tuple[str, ...], name: str, device: torch.device) -> torch.Tensor:
    """Return bool [T]: whether each of `names` is `name`; sent to the device once."""
    capture.refuse(device, "a list of formats")
    return torch.tensor([other == name for other in names], device=device)
