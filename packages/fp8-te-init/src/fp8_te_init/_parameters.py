"""The weights of a model: in their sharded form, whatever FSDP2 holds at the moment, and each once."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8_te_init._backends import Requantizable, requantizable


class NamedWeight(NamedTuple):
    """One FP8 weight of a model: qualified name, owner, name there, parameter, and how it is read and written."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    weight: Requantizable


def fp8_weights(model: nn.Module) -> list[NamedWeight]:
    """Return the FP8 weights of `model`, tied ones once, in an order that all ranks share."""
    return [
        NamedWeight(name, module, attribute, parameter, weight)
        for name, module, attribute, parameter in named_parameters(model)
        if (weight := requantizable(parameter)) is not None
    ]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield qualified name, owner, name there and parameter, each parameter once, in their sharded form."""
    # Gathered weights are other objects than those that optimizers hold, and what is kept belongs to the shards.
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            # By id: tied weights are one object under several names, and all parameters stay alive through the model.
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{attribute}".lstrip("."), module, attribute, parameter
