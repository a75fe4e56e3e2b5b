"""Track TransformerEngine modules built here: when to release copies, whether still FP8.

The facts about a module are stored in its `__dict__`, so that they are copied and dropped with the module.
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
    """Recorded facts about a module.

    Attributes:
        preserve_until: When copies of the values before rounding are dropped; None if there are none.
        names: The parameters that are FP8 weights.
        holds: Whether any of them may have a copy, or was not looked at in a forward yet.
    """

    def __init__(self, preserve_until: Release | None) -> None:
        self.preserve_until, self.names, self.holds = preserve_until, set[str](), False


def is_of_te(module: nn.Module) -> bool:
    """Return whether a module is one of TransformerEngine."""
    return any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__)


def begin(module: nn.Module, preserve_until: Release | None) -> None:
    """Remember a module that is being built; its first parameter comes."""
    if _BUILT not in module.__dict__:
        module.__dict__[_BUILT] = _Built(preserve_until)
        module.register_forward_hook(_after_forward)


def on_parameter(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Remember which parameters are FP8 weights.

    Raises:
        Fp8Error: One was, and is distributed and none any more: `fully_shard` cannot cut some of TransformerEngine's.
    """
    built = module.__dict__.get(_BUILT)
    if built is None:
        return
    if kind_of(parameter) is not None:
        built.names.add(name)
        built.holds = True
        setattr(local_of(parameter), PRESERVE_UNTIL, built.preserve_until)
    elif name in built.names and isinstance(parameter, DTensor):
        raise Fp8Error(_lost(f"{type(module).__name__}.{name}", parameter))
    else:
        built.names.discard(name)  # user code assigns a plain parameter


def lost_weights(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for each weight that lost its FP8 form."""
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
    """Warn once if `fully_shard` may have replaced parameters without a sign."""
    logger.warning("%s", sentence)


def _after_forward(module: nn.Module, *_: Any) -> None:
    """Drop copies that no living master needs, and warn of lost weights."""
    built = module.__dict__[_BUILT]
    if not built.holds:
        return
    parameters = {name: module._parameters[name] for name in built.names}
    if any(parameter is not None and not isinstance(parameter, DTensor) for parameter in parameters.values()):
        # gathered weights have no copies, the shards that they come from do
        parameters |= {shard.name: shard.parameter for shard in fsdp.shards() if shard.module is module}
    for name, parameter in parameters.items():
        if parameter is not None and kind_of(parameter) is None:
            _warn(_lost(f"{type(module).__name__}.{name}", parameter))
    weights = [weight for each in parameters.values() if isinstance(weight := fp8_of(each), TeWeight)]
    for weight in weights:
        weight.after_forward(built.preserve_until)
    built.holds = any(weight.unrounded is not None for weight in weights)
