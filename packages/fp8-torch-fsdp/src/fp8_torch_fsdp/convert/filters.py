"""`auto_filter_for_recipe`: what is worth converting, by name and by whether FP8 hardware gains with it."""

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from fp8_common import Fp8Error, Recipe, Rule, Rules
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.convert.expert_layouts import is_conv1d

ModuleFilter = Callable[[nn.Module, str], bool]
ModuleSelection = ModuleFilter | Rules | Iterable[str | Rule] | None
"""Which layers to convert: a filter of (layer, name), or rules by name; None is all of them."""

ALIGNMENT = 16
"""FP8 matrix units take dimensions that are multiples of this; other sizes are padded or refused there."""

# Below these sizes the casts cost more than the products gain. Estimates from the work that each side does, not
# measurements: a cast touches M K + K N values, the product saves time in proportion to M K N.
SMALL = {"tensorwise": (256, 256), "rowwise": (1024, 1024), "blockwise_128x128": (1024, 1024)}
"""For each granularity of the weight, the smallest (out_features, in_features) that are worth it."""


def auto_filter_for_recipe(recipe: str | Recipe | Float8LinearConfig, filter_fqns: Sequence[str] = ()) -> ModuleFilter:
    """Return a `module_filter_fn` that leaves out layers which are too small or odd-sized to gain, or named.

    A layer is kept in high precision if its full name contains one of `filter_fqns`, if one of its dimensions is no
    multiple of 16, or if one is below `SMALL` for the recipe. The limits are estimates; measure for your hardware.

    Args:
        recipe: Name of a recipe, a `Recipe`, or a configuration.
        filter_fqns: Parts of names of layers to leave out, for example "output" or "lm_head".

    Returns:
        A function of (layer, full name), for `convert_to_float8_training`.

    Raises:
        Fp8Error: Unknown recipe, or `filter_fqns` is a single string.
    """
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
        least = (min(smallest), min(smallest))
        return bool(matrices) and all(len(m) < 2 or _gains(m[0], m[1], least) for m in matrices)

    return keep


def _gains(rows: int, columns: int, smallest: tuple[int, int]) -> bool:
    sizes = (rows, columns)
    aligned = all(size % ALIGNMENT == 0 for size in sizes)
    return aligned and all(size >= least for size, least in zip(sizes, smallest, strict=True))
