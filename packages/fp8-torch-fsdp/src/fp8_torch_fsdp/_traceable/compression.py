"""Gradients of a traceable model as FP8 codes: each module gets a placement whose averages compress."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fp8_common import Fp8Error, Fp8UnsupportedError, GradientCompression
from fp8_torch_fsdp._traceable.linear import TraceableShards
from fp8_torch_fsdp._traceable.placement import Placement
from fp8_torch_fsdp._traceable.plan import TraceablePlan


def is_traceable(model: nn.Module) -> bool:
    """Return whether `fully_shard_traceable` was applied to this module."""
    return isinstance(getattr(model, "fp8_plan", None), TraceablePlan)


def compress(model: nn.Module, config: GradientCompression, chosen: set[int]) -> list[Callable[[], None]]:
    """Let gradients travel as codes and return what undoes it.

    Args:
        model: The root.
        config: How they are rounded.
        chosen: Identities of the parameters whose gradients travel as codes.

    Raises:
        Fp8Error: They are compressed already, or matrices of one module would travel in different ways.
        Fp8UnsupportedError: Rounding at random or error feedback, whose state a graph does not hold.
    """
    if config.rounding != "nearest" or config.error_feedback:
        raise Fp8UnsupportedError(
            "Under fully_shard_traceable gradients are rounded to nearest without error feedback: a graph would keep "
            "the state of the others as constants. Use fully_shard for them."
        )
    places = list(_places(model))
    if any(place.compression for _, _, place in places):
        raise Fp8Error("The gradients of the model are compressed already. Remove that first.")
    taken = [(name, module, place) for name, module, place in places if _is_chosen(name, module, chosen)]
    for _, module, place in taken:
        _put(module, dataclasses.replace(place, compression=config))
    return [lambda module=module, place=place: _put(module, place) for _, module, place in taken]


def gradient_dtypes(model: nn.Module) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield every trained parameter of a traceable model, and the name of the dtype in which its gradient travels."""
    for _, module, place in _places(model):
        codes = None if place.compression is None else place.compression.fp8_format.dtype_name
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                wide = str(parameter.dtype).removeprefix("torch.")
                yield parameter, codes if codes and parameter.ndim >= 2 else wide


def _places(model: nn.Module) -> Iterator[tuple[str, Any, Placement]]:
    """Yield every module that gathers parameters of its own, with its placement."""
    for name, module in model.named_modules():
        distribution = getattr(module, "distribution", None)
        if isinstance(distribution, TraceableShards):
            yield name, module, distribution.wire.place
        elif isinstance(place := getattr(module, "fp8_place", None), Placement):
            yield name, module, place


def _put(module: Any, place: Placement) -> None:
    if isinstance(getattr(module, "distribution", None), TraceableShards):
        old = module.distribution
        module.distribution = TraceableShards(dataclasses.replace(old.wire, place=place), old.rows)
    else:
        module.fp8_place = place


def _is_chosen(name: str, module: nn.Module, chosen: set[int]) -> bool:
    found = {id(p) in chosen for p in module._parameters.values() if p is not None and p.ndim >= 2}
    if len(found) > 1:
        raise Fp8Error(
            f"Under fully_shard_traceable the matrices of one module travel alike, and `parameters` chooses some of "
            f"{name or 'the model'}. Choose all of them or none."
        )
    return found == {True}
