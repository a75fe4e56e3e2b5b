"""`DelayedScaling` and `CurrentScaling`: scaling settings, also from recipes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fp8_common import CANONICAL, POWER_OF_2, CastRecipe, Format, Fp8Error, Recipe, ScalePolicy
from fp8_common.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8_common.plugin import Record
from fp8_common.policy import HistoryAlgo
from fp8_common.recipe import get_recipe
from fp8_common.rules import Rule, Rules

Fp8Format = Literal["HYBRID", "E4M3", "HYBRID_FNUZ", "E4M3_FNUZ"]
Granularity = Literal["tensor", "row"]
KernelGradient = Literal["float32", "kernel"]
TensorName = Literal["input", "kernel", "output_grad"]
TENSORS: tuple[TensorName, ...] = ("input", "kernel", "output_grad")
"""The tensors of one matmul that are cast."""
FORMATS: dict[Fp8Format, tuple[Format, Format]] = {
    "HYBRID": (E4M3, E5M2),
    "E4M3": (E4M3, E4M3),
    "HYBRID_FNUZ": (E4M3FNUZ, E5M2FNUZ),
    "E4M3_FNUZ": (E4M3FNUZ, E4M3FNUZ),
}
"""The forward format and the output gradients' format."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Scaling(Record):
    """Common fields of `DelayedScaling` and `CurrentScaling`.

    Attributes:
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        kernel_gradient: Dtype of the matmul for a kernel's gradient, before its scale is applied: XLA sums the parts of
            several devices in it. "kernel" is bfloat16 for a bfloat16 kernel, as in flax and bfloat16 training; other
            kernels keep "float32", which doubles the bytes that are reduced and rounds once less.
    """

    fp8_format: Fp8Format = "HYBRID"
    kernel_gradient: KernelGradient = "kernel"

    def __post_init__(self) -> None:
        """Validate the fields."""
        self.check_choices()
        _ = self.policy  # which checks the margin

    @property
    def policy(self) -> ScalePolicy:
        """The scale policy: 1.0 for amax of zero, infinity or NaN."""
        return CANONICAL

    @property
    def by_row(self) -> bool:
        """True if tensors have a scale for each row."""
        return isinstance(self, CurrentScaling) and self.granularity == "row"

    def format_of(self, tensor: TensorName) -> Format:
        """Return the format that a tensor is cast to."""
        return FORMATS[self.fp8_format][tensor == "output_grad"]

    def gradient_dtype(self, kernel: np.dtype) -> np.dtype:
        """Return the dtype of an unscaled kernel gradient, reduced over devices."""
        # Of 16-bit formats bfloat16 alone: sums of codes overflow float16.
        half = self.kernel_gradient == "kernel" and kernel == jnp.bfloat16
        return np.dtype(jnp.bfloat16 if half else np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DelayedScaling(Scaling):
    """Scales from the amax of earlier steps.

    Each matmul needs the leaves of `init_meta`.

    Attributes:
        amax_history_length: How many observations the history holds, at least 1.
        margin: The scale aims at `max * 2^-margin` of the format; an integer from -16 to 16.
        amax_compute_algo: Reduction of the history: its maximum ("max") or its newest entry ("most_recent").
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        kernel_gradient: "kernel" computes the gradient of a bfloat16 kernel in bfloat16, in which devices add their
            parts, as flax does; "float32", and other kernels, in float32: twice the bytes, and one rounding less.
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_compute_algo: HistoryAlgo = "max"

    def __post_init__(self) -> None:
        """Validate the fields."""
        Scaling.__post_init__(self)
        if type(self.amax_history_length) is not int or self.amax_history_length < 1:
            raise Fp8Error(f"amax_history_length must be an integer from 1 on, got {self.amax_history_length!r}.")

    @property
    def policy(self) -> ScalePolicy:
        """The scale rule of `fp8_common` with these settings."""
        length, algo = self.amax_history_length, self.amax_compute_algo
        return dataclasses.replace(CANONICAL, margin=self.margin, history=length, algo=algo)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CurrentScaling(Scaling):
    """Scales that come from the tensor itself; needs no state.

    Attributes:
        granularity: One scale per tensor, or one per "row": per slice along the dimensions that a matmul sums
            over. Rows keep the operands in their own precision for the backward pass, where the rows are others.
        power_of_2: Round scales down to powers of two.
        fp8_format: As in `DelayedScaling`.
        kernel_gradient: As in `DelayedScaling`.
    """

    granularity: Granularity = "tensor"
    power_of_2: bool = False

    @property
    def policy(self) -> ScalePolicy:
        """The scale policy: 1.0 for amax of zero, infinity or NaN."""
        return POWER_OF_2 if self.power_of_2 else CANONICAL


ScalingChoice = Scaling | Recipe | str | Mapping[str, Any]
"""Types of every `scaling` argument: a scaling, a recipe, its name, or a recipe as `Recipe.to_dict` writes it."""
RulesOrFilter = Rules | Iterable[str | Rule] | Callable[[Any, str], bool]
"""Which layers of a model are converted: rules by their names, or a function `(layer, name) -> bool`."""
OPERANDS: dict[Literal["output", "grad_input", "grad_weight"], tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""The operands of the three matmuls of a layer, as `Recipe.operands` returns them."""


def as_scaling(choice: ScalingChoice) -> Scaling:
    """Return the scaling of a recipe; a scaling is returned unchanged.

    Raises:
        Fp8Error: No recipe has this name, the dictionary describes none, or the layers of this package do not support
            one of its fields; the message names the field.
    """
    if isinstance(choice, Scaling):
        return choice
    recipe = get_recipe(choice)
    scaling = _nearest(recipe)
    honoured = recipe_of(scaling)
    for matmul, names in OPERANDS.items():
        for name, *casts in zip(names, recipe.operands(matmul), honoured.operands(matmul), strict=True):
            wanted, had = map(_fields, casts)
            if field := next((field for field in wanted if wanted[field] != had[field]), None):
                raise Fp8Error(
                    f"Layers of fp8_jax_owg do not support recipe {recipe.name!r}: in the matmul {matmul!r} its {name} "
                    f"has {field}={wanted[field]!r}, where they would have {had[field]!r}. They take one delayed or "
                    "dynamic scaling for all operands, tensorwise, or rowwise with dynamic scaling: take the recipe "
                    "tensorwise, tensorwise_delayed or rowwise, or change that field."
                )
    return scaling


def recipe_of(scaling: Scaling) -> Recipe:
    """Return the recipe that a scaling stands for."""
    casts = {
        operand: CastRecipe(
            format=scaling.format_of(tensor).name,
            scaling="delayed" if isinstance(scaling, DelayedScaling) else "dynamic",
            granularity="rowwise" if scaling.by_row else "tensorwise",
            policy=scaling.policy,
        )
        for operand, tensor in zip(("input", "weight", "grad_output"), TENSORS, strict=True)
    }
    return Recipe(name=type(scaling).__name__, **casts)


def _nearest(recipe: Recipe) -> Scaling:
    """Return the scaling of a recipe's input cast.

    The recipe's other casts may differ from it.
    """
    cast, policy = recipe.input, recipe.input.policy
    settings = {(forward.name, backward.name): setting for setting, (forward, backward) in FORMATS.items()}
    fp8_format = settings.get((cast.format, recipe.grad_output.format), "HYBRID")
    if cast.scaling == "delayed":
        history = {"amax_history_length": policy.history, "amax_compute_algo": policy.algo}
        return DelayedScaling(fp8_format=fp8_format, margin=policy.margin, **history)
    granularity: Granularity = "row" if cast.granularity == "rowwise" else "tensor"
    return CurrentScaling(granularity=granularity, fp8_format=fp8_format, power_of_2=policy.power_of_2)


def _fields(cast: CastRecipe) -> dict[str, Any]:
    """Return the fields of a cast and of its policy, without names."""
    fields = dataclasses.asdict(cast)
    return fields | {f"policy.{name}": value for name, value in fields.pop("policy").items() if name != "name"}
