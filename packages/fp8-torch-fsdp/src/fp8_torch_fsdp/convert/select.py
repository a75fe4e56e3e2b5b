"""Select the modules to convert; `auto_filter_for_recipe` filters by size."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from fp8_common import Fp8Error, Recipe, Rules
from fp8_common.hardware import ALIGNMENT
from fp8_common.recipe import get_recipe
from fp8_common.rules import Rule, select_modules
from fp8_torch_fsdp.config import Float8TrainingConfig
from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout, is_conv1d, layout_of
from fp8_torch_fsdp.layers.module import Float8Module
from fp8_torch_fsdp.layers.rebind_forward import is_wrapped_around

ModuleFilter = Callable[[nn.Module, str], bool]
ModuleSelection = ModuleFilter | Rules | Iterable[str | Rule] | None
"""Selection of layers: a filter of (layer, name), or rules by name; None selects all layers."""

ROWS_REPAID = (335, 500)
"""Rows per expert from which FP8 matmuls repay the casts of the weight, if the casts read it once or twice.

Estimated from the rates of an H100 (`fp8_common.advise.rows_that_repay`), not measured. Casts of activations are not
included."""


# Below these sizes, the casts cost more than the matmuls save. Estimated from operation counts, not measured: the casts
# read M K + K N values, and the time that the matmul saves is proportional to M K N.
SMALL = {"tensorwise": (256, 256), "rowwise": (1024, 1024), "blockwise_128x128": (1024, 1024), "mx": (1024, 1024)}
"""Smallest (out_features, in_features) that `auto_filter_for_recipe` keeps, by granularity of the weight."""

# benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json: single layers, forward and backward without a compiler.
LARGEST_SLOWER = 4096 * 1024
"""Number of weights of the largest layer that was at least 3 times slower than in bfloat16 with every recipe."""


def select(
    model: nn.Module,
    keep: ModuleSelection,
    config: Float8TrainingConfig,
    experts: Mapping[type, ExpertLayout],
    excluded: Mapping[nn.Module, str],
) -> tuple[dict[nn.Module, Float8TrainingConfig], dict[str, str]]:
    """Return configurations of modules to convert, and reasons for the others.

    Args:
        model: Any model.
        keep: Filter of (layer, name) that returns True for layers to convert, or rules by name.
        config: Configuration of modules for which no rule selects a recipe.
        experts: Layouts of the user's classes of experts.
        excluded: Modules that are not converted, with reasons.

    Returns:
        The configuration of each module to convert, and for each other linear layer and module of experts, by name,
        the reason.

    Raises:
        Fp8Error: If a selected layer is parametrized, or is lazy and has no weight yet.
    """
    selected, left, parametrized = dict[nn.Module, Float8TrainingConfig](), dict[str, str](), []
    candidates = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module) or layout_of(module, experts))
        and not isinstance(module, Float8Module)
    }
    for name, decision in select_modules(candidates, keep).items():
        module = candidates[name]
        reason = "filtered" if not decision.include else excluded.get(module) or _obstacle(module)
        if reason:
            left[name] = reason
        elif isinstance(module, nn.Linear) and (
            hasattr(module, "parametrizations") or "weight" not in module._parameters
        ):
            parametrized.append(name)
        elif isinstance(module, nn.Linear) and isinstance(module.weight, UninitializedParameter):
            raise Fp8Error(
                f"{name or 'The layer'} has no weight yet: run the model once to initialize its lazy layers."
            )
        else:
            recipe = decision.recipe
            selected[module] = config if recipe is None else dataclasses.replace(config, recipe=recipe)
    if parametrized:
        raise Fp8Error(
            f"{', '.join(parametrized)} cannot be converted: the weight is parametrized, and computed again in "
            "each forward. Remove the parametrization, or leave these layers out with module_filter_fn."
        )
    return selected, left


def why_left(left: Mapping[str, str]) -> str:
    """Return a sentence with the names of unconverted layers, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    parts = [
        f"{len(names)} {reason} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for reason, names in reasons.items()
    ]
    return f" Left in high precision: {'; '.join(parts)}." if parts else ""


def _obstacle(module: Any) -> str:
    """Return the reason why a layer cannot be converted, or ""."""
    if not isinstance(module, nn.Linear) or hasattr(module, "parametrizations"):
        return ""
    # class of the output projection in nn.MultiheadAttention
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by its weight without calling it"
    # The method is compared, not the class: subclasses that inherit the forward can be converted.
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has its own forward"
    if "forward" in vars(module) and not is_wrapped_around(module):
        return "its forward was replaced by one that does not call it"
    return ""


def auto_filter_for_recipe(
    recipe: str | Recipe | Float8TrainingConfig,
    filter_fqns: Sequence[str] = (),
    *,
    rows_per_expert: float | None = None,
) -> ModuleFilter:
    """Return a filter that excludes small, odd-sized or named layers.

    A layer remains in high precision if

    - its full name contains one of `filter_fqns`,
    - one of its dimensions is not a multiple of 16,
    - one of its dimensions is below `SMALL` for the recipe (an estimate),
    - or it has at most `LARGEST_SLOWER` weights (measured on one H100).

    Measure on your hardware before you rely on it.

    Args:
        recipe: Name of a recipe, a `Recipe`, or a configuration.
        filter_fqns: Parts of names of layers to exclude, for example "output" or "lm_head".
        rows_per_expert: Average number of rows of an expert in a forward: tokens of a micro-batch times experts per
            token, divided by the number of experts. Below the larger number of `ROWS_REPAID`, experts are excluded, and
            gathered in high precision. None does not exclude experts by rows.

    Returns:
        A function of (layer, full name) for `convert_to_float8_training(module_filter_fn=...)`.

    Raises:
        Fp8Error: If the recipe is unknown, `filter_fqns` is a single string, or `rows_per_expert` is negative.

    Examples:
        >>> keep = auto_filter_for_recipe("tensorwise", ["lm_head"])
        >>> large, small = nn.Linear(4096, 4096, device="meta"), nn.Linear(64, 64, device="meta")
        >>> keep(large, "mlp.up"), keep(small, "mlp.gate"), keep(large, "lm_head")
        (True, False, False)
    """
    if rows_per_expert is not None and not rows_per_expert >= 0:
        raise Fp8Error(f"rows_per_expert must be a number of rows, at least 0, got {rows_per_expert!r}.")
    if isinstance(filter_fqns, str):
        raise Fp8Error(f"filter_fqns must be a list of names, got the string {filter_fqns!r}. Write [{filter_fqns!r}].")
    config = recipe if isinstance(recipe, Float8TrainingConfig) else Float8TrainingConfig(recipe=get_recipe(recipe))
    smallest = SMALL[config.weight.granularity]

    def keep(module: nn.Module, name: str) -> bool:
        if any(part in name for part in filter_fqns):
            return False
        if isinstance(module, nn.Linear):
            return _gains(module.out_features, module.in_features, smallest)
        # Matrices of experts and `Conv1D` can be stored transposed, so both sides are compared with the same size.
        matrices = [p.shape[-2:] for p in module.parameters(recurse=False) if p.ndim == 3 or is_conv1d(module)]
        if rows_per_expert is not None and rows_per_expert < ROWS_REPAID[1] and not is_conv1d(module):
            return False
        smallest_side = (min(smallest), min(smallest))
        return bool(matrices) and all(len(m) < 2 or _gains(m[0], m[1], smallest_side) for m in matrices)

    return keep


def _gains(rows: int, columns: int, smallest: tuple[int, int]) -> bool:
    """Return whether a matrix is aligned, and large enough for FP8."""
    sizes = (rows, columns)
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    large = all(size >= least for size, least in zip(sizes, smallest, strict=True))
    return aligned and large and rows * columns > LARGEST_SLOWER
