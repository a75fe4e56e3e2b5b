"""Delayed scaling on tensors: observations and steps of histories.

On a GPU, `roll_histories` is one launch for all tensors that share a policy.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fp8_common._reference.scaling import INF_KEY
from fp8_common.formats import Format, get_data_format
from fp8_common.policy import ScalePolicy
from fp8_common.recipe import CastRecipe
from fp8_common.torch import _triton as triton
from fp8_common.torch import numerics, rounding
from fp8_common.torch._operators import operator
from fp8_common.torch.casts import scale_from_amax
from fp8_common.torch.compat import FakeTensor
from fp8_common.torch.numerics import amax_bits, torch_dtype
from fp8_common.torch.planned_casts import TensorwiseCast

UNOBSERVED = -1
"""Bits of an amax that was not observed. They are below the bits of any amax, so that MAX ignores them."""


def observed_bits(amax: torch.Tensor) -> torch.Tensor:
    """Return the int32 bits of float32 amax, `UNOBSERVED` if not finite."""
    bits = amax_bits(amax)
    # Marked before the MAX over ranks: an infinity on one rank must not hide other ranks' observations.
    return torch.where(bits >= INF_KEY, UNOBSERVED, bits)


def fitting(ready: torch.Tensor, scale: torch.Tensor, dynamic: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return where delayed scales are ready and fit the amax.

    A scale fits if it clips no more than the format rounds, and uses at least half of the range.

    Args:
        ready: Whether a scale is available, bool [n] or scalar.
        scale: Scales from earlier steps, float32 of the same shape.
        dynamic: Scales from the current amax, float32 of the same shape.
        fmt: Format of the operands.
    """
    # half a unit in the last place: 1 + 2^-4 for E4M3, 1 + 2^-3 for E5M2
    bound = 1 + 2.0 ** -(fmt.mantissa_bits + 1)
    return ready & (scale <= bound * dynamic) & (2 * scale >= dynamic)


def roll_histories(
    history: torch.Tensor, bits: torch.Tensor, scale: torch.Tensor, casts: Sequence[CastRecipe]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Roll histories after a step, and compute the next scales.

    Args:
        history: float32 [L, T]; slot 0 is the newest.
        bits: Amax bits of the step, int32 [T]. Entries below 0 count as 0.
        scale: Scales into FP8 of the step, float32 [T].
        casts: Recipes of the T casts, which share one policy.

    Returns:
        The rolled history [L, T] and the next scales into FP8 [T].
    """
    formats = ",".join([cast.format for cast in casts])
    # UNOBSERVED would be the bits of a NaN.
    amax = bits.clamp(min=0).view(torch.float32)
    rolled, following = delayed_update(history, amax, scale, formats, casts[0].policy)
    return rolled, following


@operator(lambda history, amax, scale, *_: [history.new_empty(history.shape), scale.new_empty(scale.shape)])
def delayed_update(
    history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, formats: str, policy: ScalePolicy
) -> list[torch.Tensor]:
    """Return the rolled history [L, T] and the next scales [T].

    Args:
        history: float32 [L, T]; slot 0 is the newest.
        amax: Amax of this step, float32 [T]. Infinite and NaN entries are not recorded.
        scale: Scales into FP8 of this step, float32 [T].
        formats: Names of the T formats, separated by commas.
        policy: Rule for all scales.
    """
    names = tuple(formats.split(","))
    # All or none: one launch processes all tensors, in any format.
    if all(triton.takes(amax, get_data_format(name), policy) for name in set(names)):
        return list(update_by_kernel(history, amax, scale, _numerators(names, policy, amax.device), policy)[:2])
    window, largest = numerics.update_history(history, amax, policy.algo)
    return [window, _scales_by_format(largest, names, policy, prev=scale)]


def update_by_kernel(
    history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, fmax: torch.Tensor, policy: ScalePolicy
) -> tuple[torch.Tensor, ...]:
    """Return the rolled history, next scales and reciprocals, in one launch.

    Args:
        history: float32 [L, T].
        amax: Amax of this step, float32 [T].
        scale: Scales into FP8 of this step, float32 [T].
        fmax: Numerators, float32 [T]: `scale_rule(fmt, policy)[0]` for each tensor's format.
        policy: Rule for all scales; its `algo` reduces the history.

    Returns:
        float32 [L, T], [T] and [T].
    """
    length, tensors = history.shape
    plan = triton.plans().delayed_update(tensors, length, policy)
    given = {"history_ptr": history, "amax_ptr": amax, "scale_ptr": scale}
    dense = {name: tensor.contiguous() for name, tensor in given.items()}
    return triton.launch(plan, history.device, **dense, fmax_ptr=fmax)


def _scales_by_format(
    amax: torch.Tensor, names: tuple[str, ...], policy: ScalePolicy, prev: torch.Tensor
) -> torch.Tensor:
    # The scale depends on the format: all scales are computed for each format, and selected. There are few formats.
    first, *others = dict.fromkeys(names)
    result = scale_from_amax(amax, get_data_format(first), policy, prev=prev)
    for name in others:
        scale_of_format = scale_from_amax(amax, get_data_format(name), policy, prev=prev)
        # Fake tensors need a fake mask, which must not be cached.
        has_format = _has_format.__wrapped__ if isinstance(amax, FakeTensor) else _has_format
        result = torch.where(has_format(names, name, amax.device), scale_of_format, result)
    return result


@cache
def _numerators(names: tuple[str, ...], policy: ScalePolicy, device: torch.device) -> torch.Tensor:
    """Return the numerators of scales, float32 [T], cached on the device."""
    # Cached, because a transfer in each step stalls the host and cannot be captured in a CUDA graph. The cache has no
    # limit, because graphs point to its tensors. It has one entry per list of formats, a few bytes per operand.
    triton.refuse_in_capture(device, "a list of formats")
    return torch.tensor(
        [triton.plans().scale_rule(name, policy)[0] for name in names], dtype=torch.float32, device=device
    )


@cache
def _has_format(names: tuple[str, ...], name: str, device: torch.device) -> torch.Tensor:
    """Return whether each of `names` equals `name`, bool [T], cached."""
    triton.refuse_in_capture(device, "a list of formats")
    return torch.tensor([other == name for other in names], device=device)


def _cast_by_kernel(
    x: torch.Tensor,
    amax: torch.Tensor,
    delayed: torch.Tensor,
    ready: torch.Tensor,
    late: torch.Tensor | None,
    fmt: Format,
    policy: ScalePolicy,
    fits: bool,
) -> tuple[torch.Tensor, ...]:
    cast = TensorwiseCast(x.shape, x.dtype, fmt, policy, with_scale=True, scale_shape=(1,))
    # An amax has no sign, so its bits are the keys of the kernels.
    given = {"scale_ptr": amax.view(torch.int32).reshape(1), "delayed_ptr": delayed, "ready_ptr": ready}
    outputs: Any = cast.by(x.contiguous(), given if late is None else given | {"late_ptr": late}, fits)
    return outputs.codes, outputs.transposed.codes, outputs.scale.view(()), outputs.scale_inv.view(())


@operator(
    lambda x, amax, delayed, ready, late, fmt, *_: (
        *(x.new_empty(shape, dtype=torch_dtype(fmt)) for shape in (x.shape, x.shape[::-1])),
        *(delayed.new_empty(()) for _ in range(2)),
    ),
    _cast_by_kernel,
)
def cast_delayed(
    x: torch.Tensor,
    amax: torch.Tensor,
    delayed: torch.Tensor,
    ready: torch.Tensor,
    late: torch.Tensor | None,
    fmt: Format,
    policy: ScalePolicy,
    fits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast a matrix and its transpose with a delayed scale, if usable.

    Args:
        x: Matrix [M, N].
        amax: Amax of x, float32 scalar.
        delayed: Scale from earlier steps, float32 scalar.
        ready: Whether the delayed scale is available, bool scalar.
        late: Whether the delayed scale must no longer be used, bool scalar; it is then NaN. None skips the check.
        fmt: FP8 format.
        policy: Rule for the scale from `amax`, which replaces an unusable delayed scale.
        fits: Whether the delayed scale must fit `amax`.

    Returns:
        Codes [M, N] and [N, M], and scalar scales into and back from FP8.
    """
    dynamic = numerics.scale_from_amax(amax, fmt, policy)
    usable = fitting(ready, delayed, dynamic, fmt) if fits else ready
    scale = torch.where(usable, delayed if late is None else delayed.masked_fill(late, torch.nan), dynamic)
    codes = rounding.quantize(x.contiguous(), scale, fmt)
    return codes, codes.view(torch.uint8).t().contiguous().view(codes.dtype), scale, numerics.divide(1.0, scale)
