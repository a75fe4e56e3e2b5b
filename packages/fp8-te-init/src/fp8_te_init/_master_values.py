"""What masters are made of: the values that parameters start from, their gradients, and writes to them since."""

import logging
from typing import Any

import torch

from fp8_te_init._backends import requantizable
from fp8_te_init._compat import local_of, version_of
from fp8_te_init._errors import StaleInitError
from fp8_te_init._parameter_mark import kept_of
from fp8_te_init._weight import primary_of

logger = logging.getLogger(__name__)


def gradient_of(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of a parameter, where autograd puts it or where TransformerEngine and Megatron do."""
    found = (getattr(parameter, name, None) for name in ("grad", "decoupled_grad", "main_grad"))
    return next((gradient for gradient in found if gradient is not None), None)


def needs_master(parameter: torch.Tensor) -> bool:
    return requantizable(parameter) is not None or parameter.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def start_of(parameter: Any) -> torch.Tensor:
    """Return float32 values for a master, from what is kept for a parameter, else from the values that it has."""
    values = values_of(parameter, strict=True)
    kept = kept_of(parameter)
    if kept is not None and kept.source is None and kept.dropped_by is not None:
        logger.warning(
            "The master of a weight of shape %s starts from rounded values: those before rounding were dropped by %s. "
            'Make the optimizer before that, keep them with primary_weights(release="manual") for weights that are '
            "trained later, or seed from a checkpoint.",
            tuple(parameter.shape),
            kept.dropped_by,
        )
    return values.to(device=local_of(parameter).device, dtype=torch.float32, copy=True)


def values_of(parameter: Any, *, strict: bool = False) -> torch.Tensor:
    """Return the best values of the rows held here of a parameter.

    Args:
        parameter: FP8 or not.
        strict: Raise if what is kept is stale, instead of taking the rounded values.
    """
    weight = requantizable(parameter)
    if weight is None:
        return local_of(parameter).detach()
    values, kept = weight.pending(), kept_of(parameter)
    if values is None and kept is not None:
        try:
            values = kept.values(weight)
        except StaleInitError:
            if strict:
                raise
    return weight.values() if values is None else values


def writes_to(parameter: torch.Tensor) -> int:
    """Return how many writes to a parameter were seen so far.

    FP8 weights count their own: torch misses those through `.data`, and counts some that change nothing.
    """
    weight = primary_of(parameter)
    return version_of(parameter) if weight is None else weight.state.writes


def is_rounded_from(parameter: Any, master: torch.Tensor) -> bool:
    """Return whether a parameter holds exactly what its master is rounded to."""
    weight = requantizable(parameter)
    if weight is None:
        return torch.equal(master.to(parameter.dtype), local_of(parameter))
    return torch.equal(weight.quantized(master), weight.codes())
