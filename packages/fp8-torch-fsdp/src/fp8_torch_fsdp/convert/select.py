"""Select the modules to convert; `auto_filter_for_recipe` filters by size."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from fp8_common import Fp8Error, Recipe, Rules
from fp8_common.rules import Rule, select_modules
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout, is_conv1d, layout_of
from fp8_torch_fsdp.layers.module import Float8Module
from fp8_torch_fsdp.layers.rebind_forward import is_wrapped_around

ModuleFilter = Callable[[nn.Module, str], bool]
ModuleSelection = ModuleFilter | Rules | Iterable[str | Rule] | None
"""Which layers to convert: a filter of (layer, name), or rules by name; None is all of them."""

ROWS_REPAID = (335, 500)
"""From how many rows on an expert repays the casts of its weight, read once or twice for them: by the rates of an H100
(`fp8_common.advise.rows_that_repay`), not measured. Casts of activations come on top."""

ALIGNMENT = 16
"""FP8 matrix units require dimensions that are multiples of this; other sizes are padded or rejected there."""

# Below these sizes the casts cost more than the matmuls gain. Estimated from operation counts, not measured: a cast
# reads M K + K N values, the matmul saves time in proportion to M K N.
SMALL = {"tensorwise": (256, 256), "rowwise": (1024, 1024), "blockwise_128x128": (1024, 1024), "mx": (1024, 1024)}
"""For each granularity of the weight, the smallest (out_features, in_features) that are worth it."""

# benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json, layers alone, forward and backward without a compiler.
LARGEST_SLOWER = 4096 * 1024
"""Weights of a layer that was 3 times slower than in bfloat16 on an H100, or more, in every recipe."""


def select(
    model: nn.Module,
    keep: ModuleSelection,
    config: Float8LinearConfig,
    experts: Mapping[type, ExpertLayout],
    wide: Mapping[nn.Module, str],
) -> tuple[dict[nn.Module, Float8LinearConfig], dict[str, str]]:
    """Return configurations of modules to convert, and reasons for the others.

    Args:
        model: Any model.
        keep: The user's filter, or rules by name.
        config: The configuration if no rule gives a recipe.
        experts: Layouts of the user's classes of experts.
        wide: Modules that stay, with the reason.

    Raises:
        Fp8Error: A parametrized layer that the filter does not leave out, or a lazy one without a weight.
    """
    selected, left, refused = dict[nn.Module, Float8LinearConfig](), dict[str, str](), []
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
            recipe = decision.recipe
            selected[module] = config if recipe is None else dataclasses.replace(config, recipe=recipe)
    if refused:
        raise Fp8Error(
            f"{', '.join(refused)} cannot be converted: the weight is parametrized: each forward computes it again. "
            "Remove the parametrization, or leave these layers out with module_filter_fn."
        )
    return selected, left


def why_left(left: Mapping[str, str]) -> str:
    """Return a sentence with the names of remaining layers, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    parts = [
        f"{len(names)} {reason} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for reason, names in reasons.items()
    ]
    return f" Left in high precision: {'; '.join(parts)}." if parts else ""


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


def auto_filter_for_recipe(
    recipe: str | Recipe | Float8LinearConfig,
    filter_fqns: Sequence[str] = (),
    *,
    rows_per_expert: float | None = None,
) -> ModuleFilter:
    """Return a filter that excludes small, odd-sized or named layers.

    A layer is kept in high precision if its full name contains one of `filter_fqns`, if one of its dimensions is no
    multiple of 16, if one is below `SMALL` for the recipe (estimates), or if it has at most `LARGEST_SLOWER` weights
    (measured on one H100). Measure for your hardware.

    Args:
        recipe: Name of a recipe, a `Recipe`, or a configuration.
        filter_fqns: Parts of names of layers to leave out, for example "output" or "lm_head".
        rows_per_expert: The rows that an expert gets in a forward, on average: tokens of a micro-batch times chosen
            experts over all. Experts with fewer than `ROWS_REPAID` are left out, and gathered in high precision.

    Returns:
        A function of (layer, full name), for `convert_to_float8_training`.

    Raises:
        Fp8Error: Unknown recipe, `filter_fqns` is a single string, or `rows_per_expert` is negative.
    """
    if rows_per_expert is not None and not rows_per_expert >= 0:
        raise Fp8Error(f"rows_per_expert must be a number of rows, at least 0, got {rows_per_expert!r}.")
    if isinstance(filter_fqns, str):
        raise Fp8Error(f"filter_fqns must be a list of names, got the string {filter_fqns!r}. Write [{filter_fqns!r}].")
    config = recipe if isinstance(recipe, Float8LinearConfig) else Float8LinearConfig.from_recipe_name(recipe)
    smallest = SMALL[config.weight.granularity]

    def keep(module: nn.Module, name: str) -> bool:
        if any(part in name for part in filter_fqns):
            return False
        if isinstance(module, nn.Linear):
            return _gains(module.out_features, module.in_features, smallest)
        # of experts and transposed layers, each matrix; which side is which, their layout knows and this need not
        matrices = [p.shape[-2:] for p in module.parameters(recurse=False) if p.ndim == 3 or is_conv1d(module)]
        if rows_per_expert is not None and rows_per_expert < ROWS_REPAID[1] and not is_conv1d(module):
            return False
        least = (min(smallest), min(smallest))
        return bool(matrices) and all(len(m) < 2 or _gains(m[0], m[1], least) for m in matrices)

    return keep


def _gains(rows: int, columns: int, smallest: tuple[int, int]) -> bool:
    sizes = (rows, columns)
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    large = all(size >= least for size, least in zip(sizes, smallest, strict=True))
    return aligned and large and rows * columns > LARGEST_SLOWER
