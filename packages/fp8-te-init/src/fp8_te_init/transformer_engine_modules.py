"""Track TransformerEngine modules built in `fp8_model_init`: release copies, detect lost FP8.

The record of a module is stored in its `__dict__`, so that it is copied and dropped with the module.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding import fsdp
from fp8_te_init.transformer_engine import PRESERVE_UNTIL, TeWeight, fp8_of, kind_of
from fp8_te_init.weight.state import Release

logger = logging.getLogger(__name__)

_BUILT = "_fp8_built"
ORDER = (
    "Use TransformerEngine's order: build on the meta device (device='meta'), fully_shard, to_empty, then "
    "reset_parameters."
)


class _Built:
    """Record of a module.

    Attributes:
        preserve_until: When copies of the unrounded values are dropped; None if there are none.
        names: Names of the parameters that are FP8 weights.
        may_hold_copies: Whether the next forward must check the weights, because one may have a copy.
    """

    def __init__(self, preserve_until: Release | None) -> None:
        self.preserve_until, self.names, self.may_hold_copies = preserve_until, set[str](), False


def is_of_te(module: nn.Module) -> bool:
    """Return whether a module is one of TransformerEngine."""
    return any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__)


def track(module: nn.Module, preserve_until: Release | None) -> None:
    """Record a module under construction, and hook its forward, once."""
    if _BUILT not in module.__dict__:
        module.__dict__[_BUILT] = _Built(preserve_until)
        module.register_forward_hook(_after_forward)


def record_parameter(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Record whether a parameter of a tracked module is an FP8 weight.

    Raises:
        Fp8Error: If an FP8 weight is replaced by a distributed one without FP8: `fully_shard` cannot shard some tensors
            of TransformerEngine.
    """
    built = module.__dict__.get(_BUILT)
    if built is None:
        return
    if kind_of(parameter) is not None:
        built.names.add(name)
        built.may_hold_copies = True
        setattr(local_of(parameter), PRESERVE_UNTIL, built.preserve_until)
    elif name in built.names and isinstance(parameter, DTensor):
        raise Fp8Error(_lost(f"{type(module).__name__}.{name}", parameter))
    else:
        built.names.discard(name)  # user code has assigned a plain parameter


def lost_weights(model: nn.Module) -> Iterator[str]:
    """Yield an error message for each weight that is no longer FP8."""
    for prefix, module in model.named_modules():
        built = module.__dict__.get(_BUILT)
        for name in sorted(built.names) if built is not None else ():
            parameter = module._parameters.get(name)
            if parameter is not None and kind_of(parameter) is None:
                yield _lost(f"{prefix}.{name}" if prefix else name, parameter)


def _lost(name: str, parameter: torch.Tensor) -> str:
    local = local_of(parameter)
    return (
        f"{name} was built as an FP8 weight of TransformerEngine, and is a {type(local).__name__} of {local.dtype} "
        f"now, with rounded values: fully_shard cannot cut such a tensor. {ORDER}"
    )


@functools.cache
def _warn(sentence: str) -> None:
    """Log a warning, once for each sentence."""
    logger.warning("%s", sentence)


def _after_forward(module: nn.Module, *_: Any) -> None:
    """Drop copies as `preserve_until` selects, and warn of lost weights."""
    built = module.__dict__[_BUILT]
    if not built.may_hold_copies:
        return
    parameters = {name: module._parameters[name] for name in built.names}
    if any(parameter is not None and not isinstance(parameter, DTensor) for parameter in parameters.values()):
        # gathered weights have no copies, but their shards have
        parameters |= {shard.name: shard.parameter for shard in fsdp.shards() if shard.module is module}
    for name, parameter in parameters.items():
        if parameter is not None and kind_of(parameter) is None:
            _warn(_lost(f"{type(module).__name__}.{name}", parameter))
    weights = [weight for each in parameters.values() if isinstance(weight := fp8_of(each), TeWeight)]
    for weight in weights:
        weight.after_forward(built.preserve_until)
    built.may_hold_copies = any(weight.unrounded is not None for weight in weights)
