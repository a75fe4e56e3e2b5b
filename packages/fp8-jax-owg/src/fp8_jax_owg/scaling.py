"""`DelayedScaling` and `CurrentScaling`: scales from earlier steps or from the tensor itself, and recipes for them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fp8_common import (
    CANONICAL,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    POWER_OF_2,
    CastRecipe,
    Format,
    Fp8Error,
    Recipe,
    Rule,
    Rules,
    ScalePolicy,
    get_recipe,
)
from fp8_common.plugin import Record

Fp8Format = Literal["HYBRID", "E4M3", "HYBRID_FNUZ", "E4M3_FNUZ"]
HistoryAlgo = Literal["max", "most_recent"]
Granularity = Literal["tensor", "row"]
KernelGradient = Literal["float32", "kernel"]
Tensor = Literal["input", "kernel", "output_grad"]
TENSORS: tuple[Tensor, ...] = ("input", "kernel", "output_grad")
"""The tensors of one matmul that are cast."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScaling(Record):
    """Scales that come from the amax of earlier steps; needs the leaves of `init_meta` for each matmul.

    Attributes:
        amax_history_length: How many observations the history holds, at least 1.
        margin: The scale aims at `max * 2^-margin` of the format; an integer from -16 to 16.
        amax_compute_algo: What stands for the history: its maximum ("max") or its newest entry ("most_recent").
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        kernel_gradient: The dtype of the matmul that gives a kernel's gradient, before its scale is applied: XLA adds
            the parts of several devices in it. "kernel" is that of a bfloat16 kernel, in which flax and bfloat16
            training add them too; other kernels keep "float32", which doubles the bytes that are reduced and rounds
            once less.
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_compute_algo: HistoryAlgo = "max"
    fp8_format: Fp8Format = "HYBRID"
    kernel_gradient: KernelGradient = "kernel"

    def __post_init__(self) -> None:
        """Refuse values that no layer could honour."""
        self.check_choices()
        if type(self.amax_history_length) is not int or self.amax_history_length < 1:
            raise Fp8Error(f"amax_history_length must be an integer from 1 on, got {self.amax_history_length!r}.")
        _ = self.policy  # which checks the margin

    @property
    def policy(self) -> ScalePolicy:
        """The scale rule of `fp8_common` with these settings."""
        length, algo = self.amax_history_length, self.amax_compute_algo
        return dataclasses.replace(CANONICAL, margin=self.margin, history=length, algo=algo)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurrentScaling(Record):
    """Scales that come from the tensor itself; needs no state.

    Attributes:
        granularity: One scale per tensor, or one per "row": per slice along the dimensions that a matmul sums
            over. Rows keep the operands in their own precision for the backward pass, where the rows are others.
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        power_of_2: Round scales down to powers of two.
        kernel_gradient: The dtype of the matmul that gives a kernel's gradient, before its scale is applied: XLA adds
            the parts of several devices in it. "kernel" is that of a bfloat16 kernel, in which flax and bfloat16
            training add them too; other kernels keep "float32", which doubles the bytes that are reduced and rounds
            once less.
    """

    granularity: Granularity = "tensor"
    fp8_format: Fp8Format = "HYBRID"
    power_of_2: bool = False
    kernel_gradient: KernelGradient = "kernel"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        self.check_choices()

    @property
    def policy(self) -> ScalePolicy:
        """The scale rule of `fp8_common`: 1.0 for an amax that is zero or not finite."""
        return POWER_OF_2 if self.power_of_2 else CANONICAL


Scaling = DelayedScaling | CurrentScaling
FORMATS: dict[Fp8Format, tuple[Format, Format]] = {
    "HYBRID": (E4M3, E5M2),
    "E4M3": (E4M3, E4M3),
    "HYBRID_FNUZ": (E4M3FNUZ, E5M2FNUZ),
    "E4M3_FNUZ": (E4M3FNUZ, E4M3FNUZ),
}
"""The format forward and that of output gradients."""


def format_of(tensor: Tensor, scaling: Scaling) -> Format:
    """Return the format that a tensor is cast to."""
    forward, gradient = FORMATS[scaling.fp8_format]
    return gradient if tensor == "output_grad" else forward


def by_row(scaling: Scaling) -> bool:
    """Return whether tensors have a scale for each row."""
    return isinstance(scaling, CurrentScaling) and scaling.granularity == "row"


def gradient_dtype(scaling: Scaling, kernel: np.dtype) -> np.dtype:
    """Return the dtype of the gradient of a kernel before it is scaled, in which devices add their parts."""
    # Of 16-bit formats bfloat16 alone: sums of codes overflow float16.
    half = scaling.kernel_gradient == "kernel" and kernel == jnp.bfloat16
    return np.dtype(jnp.bfloat16 if half else np.float32)


ScalingChoice = Scaling | Recipe | str | Mapping[str, Any]
"""What every `scaling` argument takes: a scaling, a recipe, its name, or a recipe as `Recipe.to_dict` writes it."""
RulesOrFilter = Rules | Iterable[str | Rule] | Callable[[Any, str], bool]
"""Which layers of a model are converted: rules by their names, or a function `(layer, name) -> bool`."""
GRANULARITIES: dict[str, Granularity] = {"tensorwise": "tensor", "rowwise": "row"}
OPERANDS: dict[Literal["output", "grad_input", "grad_weight"], tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""The operands of the three matmuls of a layer, as `Recipe.operands` returns them."""
SETTINGS = {(forward.name, gradient.name): setting for setting, (forward, gradient) in FORMATS.items()}
"""The setting for a format forward and one of gradients."""


def as_scaling(choice: ScalingChoice) -> Scaling:
    """Return the scaling that a recipe stands for; a scaling is returned as it is.

    Raises:
        Fp8Error: No recipe has this name, the dictionary describes none, or the layers of this package cannot honour
            one of its fields; the message names the field.
    """
    if isinstance(choice, DelayedScaling | CurrentScaling):
        return choice
    if not isinstance(choice, Recipe | str | Mapping):
        raise Fp8Error(
            "scaling must be a DelayedScaling, a CurrentScaling, a Recipe, the name of a recipe or its dictionary, "
            f"got {choice!r}."
        )
    recipe = Recipe.from_dict(choice) if isinstance(choice, Mapping) else get_recipe(choice)
    scaling = _nearest(recipe)
    if different := next(_differences(recipe, recipe_of(scaling)), None):
        matmul, operand, field, wanted, had = different
        raise Fp8Error(
            f"Layers of fp8_jax_owg cannot honour recipe {recipe.name!r}: in the matmul {matmul!r} its {operand} has "
            f"{field}={wanted!r}, where they would have {had!r}. They take one delayed or dynamic scaling for all "
            "operands, tensorwise, or rowwise with dynamic scaling: take the recipe tensorwise, tensorwise_delayed or "
            "rowwise, or change that field."
        )
    return scaling


def recipe_of(scaling: Scaling) -> Recipe:
    """Return the recipe that a scaling stands for."""
    by_row = isinstance(scaling, CurrentScaling) and scaling.granularity == "row"
    casts = {
        operand: CastRecipe(
            format=format_of(tensor, scaling).name,
            scaling="delayed" if isinstance(scaling, DelayedScaling) else "dynamic",
            granularity="rowwise" if by_row else "tensorwise",
            policy=scaling.policy,
        )
        for operand, tensor in (("input", "input"), ("weight", "kernel"), ("grad_output", "output_grad"))
    }
    return Recipe(name=type(scaling).__name__, **casts)


def _nearest(recipe: Recipe) -> Scaling:
    """Return the scaling that has what a recipe says of its input; what it says of the rest may differ."""
    cast, policy = recipe.input, recipe.input.policy
    fp8_format = SETTINGS.get((cast.format, recipe.grad_output.format), "HYBRID")
    if cast.scaling == "delayed":
        return DelayedScaling(
            amax_history_length=policy.history,
            margin=policy.margin,
            amax_compute_algo=policy.algo,
            fp8_format=fp8_format,
        )
    granularity = GRANULARITIES.get(cast.granularity, "tensor")
    return CurrentScaling(granularity=granularity, fp8_format=fp8_format, power_of_2=policy.power_of_2)


def _differences(recipe: Recipe, honoured: Recipe) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Yield matmul, operand, field, and both values wherever a cast of a recipe differs from what layers do."""
    for matmul, names in OPERANDS.items():
        for name, wanted, had in zip(names, recipe.operands(matmul), honoured.operands(matmul), strict=True):
            for field in dataclasses.fields(CastRecipe):
                if field.name != "policy":
                    yield from _difference(
                        matmul, name, field.name, getattr(wanted, field.name), getattr(had, field.name)
                    )
            for part in dataclasses.fields(ScalePolicy):
                # the name of a policy changes no number
                if part.name != "name":
                    values = getattr(wanted.policy, part.name), getattr(had.policy, part.name)
                    yield from _difference(matmul, name, f"policy.{part.name}", *values)


def _difference(
    matmul: str, operand: str, field: str, wanted: Any, had: Any
) -> Iterator[tuple[str, str, str, Any, Any]]:
    if wanted != had:
        yield matmul, operand, field, wanted, had
