"""Delayed scaling on tensors: observations, and steps of all histories.

On a GPU `roll_histories` is one launch for all tensors that share a rule.
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
"""Bits of an operand that was not observed; below every amax, so that MAX ignores it."""


def observed_bits(amax: torch.Tensor) -> torch.Tensor:
    """Return int32 bits of `amax`, UNOBSERVED if not finite.

    `amax` is float32; infinite and NaN ones are not recorded.
    """
    bits = amax_bits(amax)
    # Marked before ranks are combined by MAX: an infinity on one rank must not hide the others' observations.
    return torch.where(bits >= INF_KEY, UNOBSERVED, bits)


def fitting(ready: torch.Tensor, scale: torch.Tensor, dynamic: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return where delayed scales are ready and fit.

    They clip no more than the format rounds, and waste no range.

    Args:
        ready: bool [n] or scalar.
        scale: float32 of the same shape, from earlier steps.
        dynamic: float32 of the same shape, from the present amax.
        fmt: Of the operands.
    """
    # half a unit of the last place: 1 + 2^-4 for E4M3, 1 + 2^-3 for E5M2
    bound = 1 + 2.0 ** -(fmt.mantissa_bits + 1)
    return ready & (scale <= bound * dynamic) & (2 * scale >= dynamic)


def roll_histories(
    history: torch.Tensor, bits: torch.Tensor, scale: torch.Tensor, casts: Sequence[CastRecipe]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return histories and scales after an observed step.

    Args:
        history: float32 [L, T], slot 0 the newest.
        bits: int32 [T]: the step's observations; entries below 0 count as 0.
        scale: float32 [T]: the scales into FP8 of the step.
        casts: T casts that share one policy.
    """
    formats = ",".join([cast.format for cast in casts])
    # UNOBSERVED has the bits of a NaN.
    amax = bits.clamp(min=0).view(torch.float32)
    rolled, following = delayed_update(history, amax, scale, formats, casts[0].policy)
    return rolled, following


@operator(lambda history, amax, scale, *_: [history.new_empty(history.shape), scale.new_empty(scale.shape)])
def delayed_update(
    history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, formats: str, policy: ScalePolicy
) -> list[torch.Tensor]:
    """Return the rolled history and the next scales.

    Args:
        history: float32 [L, T], slot 0 the newest.
        amax: float32 [T], observed in this step; infinite and NaN ones are not recorded.
        scale: float32 [T]: the scales into FP8 of this step.
        formats: The names of the T formats, with commas between.
        policy: The rule that all share.
    """
    names = tuple(formats.split(","))
    # All or none: one launch handles every tensor, in any format.
    if all(triton.takes(amax, get_data_format(name), policy) for name in set(names)):
        return list(update_by_kernel(history, amax, scale, _numerators(names, policy, amax.device), policy)[:2])
    window, largest = numerics.update_history(history, amax, policy.algo)
    return [window, _scales_by_format(largest, names, policy, prev=scale)]


def update_by_kernel(
    history: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, fmax: torch.Tensor, policy: ScalePolicy
) -> tuple[torch.Tensor, ...]:
    """Return rolled history [L, T], scales and reciprocals [T].

    float32, in one launch.

    Args:
        history: float32 [L, T].
        amax: float32 [T]: this step's amax.
        scale: float32 [T]: the scales into FP8 of this step.
        fmax: float32 [T]: numerators, from `scale_rule(fmt, policy)[0]` of each tensor's format.
        policy: The rule; its `algo` reduces the history.
    """
    length, tensors = history.shape
    plan = triton.plans().delayed_update(tensors, length, policy)
    given = {"history_ptr": history, "amax_ptr": amax, "scale_ptr": scale}
    dense = {name: tensor.contiguous() for name, tensor in given.items()}
    return triton.launch(plan, history.device, **dense, fmax_ptr=fmax)


def _scales_by_format(
    amax: torch.Tensor, names: tuple[str, ...], policy: ScalePolicy, prev: torch.Tensor
) -> torch.Tensor:
    # The scale rule depends on the format, so every format computes all scales and keeps its own; there are two or so.
    first, *others = dict.fromkeys(names)
    result = scale_from_amax(amax, get_data_format(first), policy, prev=prev)
    for name in others:
        scale_of_format = scale_from_amax(amax, get_data_format(name), policy, prev=prev)
        # fake tensors go with fake ones, of which nothing may be left in a cache
        has_format = _has_format.__wrapped__ if isinstance(amax, FakeTensor) else _has_format
        result = torch.where(has_format(names, name, amax.device), scale_of_format, result)
    return result


@cache
def _numerators(names: tuple[str, ...], policy: ScalePolicy, device: torch.device) -> torch.Tensor:
    """Return the scales' numerators [T], sent to the device once.

    They are float32.
    """
    # Cached: a transfer in every step would stall the host, and cannot be captured in a CUDA graph. Without a limit: a
    # graph points to it, and there is one for each list of formats, which is a few bytes for each operand of a model.
    triton.refuse_in_capture(device, "a list of formats")
    return torch.tensor(
        [triton.plans().scale_rule(name, policy)[0] for name in names], dtype=torch.float32, device=device
    )


@cache
def _has_format(names: tuple[str, ...], name: str, device: torch.device) -> torch.Tensor:
    """Return bool [T]: whether `names` equal `name`, sent once."""
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
    cast = TensorwiseCast(x.shape, x.dtype, fmt, policy, with_scale=True, one=(1,))
    # an amax has no sign, so its bits are the keys of the kernels
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
    """Return codes [M, N] and [N, M], and scalar scales.

    Scales into and back from FP8.

    Args:
        x: The matrix.
        amax: float32, of x.
        delayed: float32 scalar, the scale of earlier steps.
        ready: bool scalar, whether there is one.
        late: bool scalar, whether it must no longer be used; None skips the check.
        fmt: FP8 format.
        policy: The rule for another scale.
        fits: Whether the scale of earlier steps must fit x.
    """
    dynamic = numerics.scale_from_amax(amax, fmt, policy)
    usable = fitting(ready, delayed, dynamic, fmt) if fits else ready
    scale = torch.where(usable, delayed if late is None else delayed.masked_fill(late, torch.nan), dynamic)
    codes = rounding.quantize(x.contiguous(), scale, fmt)
    return codes, codes.view(torch.uint8).t().contiguous().view(codes.dtype), scale, numerics.divide(1.0, scale)
