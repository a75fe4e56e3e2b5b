"""Which modules of a model become FP8 modules, and why the others stay in high precision."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from fp8_common import Fp8Error, select_modules
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.convert.adapters import adapters
from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout, is_conv1d, layout_of
from fp8_torch_fsdp.convert.filters import ModuleSelection
from fp8_torch_fsdp.layers.module import Float8Module
from fp8_torch_fsdp.layers.rebind import is_wrapped_around


def select(
    model: nn.Module,
    keep: ModuleSelection,
    config: Float8LinearConfig,
    experts: Mapping[type, ExpertLayout],
    wide: Mapping[nn.Module, str],
) -> tuple[dict[nn.Module, Float8LinearConfig], dict[str, str]]:
    """Return the modules to convert with their configurations, and the names of others with the reason they stay.

    Args:
        model: Any model.
        keep: The user's filter, or rules by name.
        config: The configuration where a rule gives no recipe of its own.
        experts: Layouts of the user's classes of experts.
        wide: Modules that stay, with the reason.

    Raises:
        Fp8Error: A parametrized layer that the filter does not leave out, or a lazy one without a weight.
    """
    chosen, left, refused = dict[nn.Module, Float8LinearConfig](), dict[str, str](), []
    wide = dict.fromkeys(adapters(model), "an adapter") | dict(wide)
    candidates = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module) or layout_of(module, experts))
        and not isinstance(module, Float8Module)
    }
    for name, decision in select_modules(candidates, keep).items():
        module = candidates[name]
        reason = "filtered" if not decision.include else wide.get(module) or _why_not(module)
        if reason:
            left[name] = reason
        elif isinstance(module, nn.Linear) and (
            hasattr(module, "parametrizations") or "weight" not in module._parameters
        ):
            refused.append(name)
        elif isinstance(module, nn.Linear) and isinstance(module.weight, UninitializedParameter):
            raise Fp8Error(f"{name or 'The layer'} has no weight yet: run the model once to make its lazy layers real.")
        else:
            own = decision.recipe
            chosen[module] = config if own is None else dataclasses.replace(config, recipe=own)
    if refused:
        raise Fp8Error(
            f"{', '.join(refused)} cannot be converted: the weight is parametrized, computed anew in each forward. "
            "Remove the parametrization, or leave these layers out with module_filter_fn."
        )
    return chosen, left


def why_left(left: Mapping[str, str]) -> str:
    """Return a sentence with the names of what was left, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    parts = [
        f"{len(names)} {reason} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for reason, names in reasons.items()
    ]
    return f" Left in high precision: {'; '.join(parts)}." if parts else ""


def other_weights(model: nn.Module) -> str:
    """Return which modules that are no nn.Linear hold matrices: experts without a layout, convolutions."""
    found: dict[str, int] = {}
    for module in model.modules():
        matrices = [p for p in module._parameters.values() if p is not None and p.ndim >= 2 and p.is_floating_point()]
        if matrices and not isinstance(module, nn.Linear | nn.Embedding):
            name = type(module).__name__
            found[name] = found.get(name, 0) + 1
    if not found:
        return ""
    names = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
    return (
        f" Weights of two and more dimensions are in {names}: make nn.Linear of what multiplies by them, describe "
        "stacked experts by experts={TheirClass: ExpertLayout(...)}, or let enable_float8_all_gather(model) gather "
        "them in FP8 for the layers as they are."
    )


def _why_not(module: Any) -> str:
    """Return why a linear layer cannot be converted; "" if it can."""
    if not isinstance(module, nn.Linear) or hasattr(module, "parametrizations"):
        return ""
    # the class of the output projection of nn.MultiheadAttention
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by its weight without calling it"
    # Compared on the class: a subclass that only adds attributes or an initialisation can be converted.
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has its own forward"
    if "forward" in vars(module) and not is_wrapped_around(module):
        return "its forward was replaced by one that does not call it"
    return ""
