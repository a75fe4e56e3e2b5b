"""`DelayedScaling` and `CurrentScaling`: rules for scales, also from recipes."""

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
"""Names of the tensors of one matmul that are cast."""
FORMATS: dict[Fp8Format, tuple[Format, Format]] = {
    "HYBRID": (E4M3, E5M2),
    "E4M3": (E4M3, E4M3),
    "HYBRID_FNUZ": (E4M3FNUZ, E5M2FNUZ),
    "E4M3_FNUZ": (E4M3FNUZ, E4M3FNUZ),
}
"""Format of inputs and kernels, and format of output gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Scaling(Record):
    """Common fields of `DelayedScaling` and `CurrentScaling`.

    Attributes:
        fp8_format: Formats. "HYBRID" is E4M3 forward and E5M2 for output gradients, "E4M3" is E4M3 for all tensors.
            "HYBRID_FNUZ" and "E4M3_FNUZ" are the formats of AMD MI300.
        kernel_gradient: dtype of the matmul for the gradient of a kernel, before it is scaled. XLA sums the parts of
            several devices in this dtype. "kernel" is bfloat16 for bfloat16 kernels, as in flax, and float32 for
            others. "float32" doubles the reduced bytes of bfloat16 kernels, and rounds once less.
    """

    fp8_format: Fp8Format = "HYBRID"
    kernel_gradient: KernelGradient = "kernel"

    def __post_init__(self) -> None:
        """Validate the fields."""
        self.check_choices()
        _ = self.policy  # building the policy validates the margin

    @property
    def policy(self) -> ScalePolicy:
        """Scale policy of `fp8_common`."""
        return CANONICAL

    @property
    def by_row(self) -> bool:
        """True if operands have one scale per row."""
        return isinstance(self, CurrentScaling) and self.granularity == "row"

    def format_of(self, tensor: TensorName) -> Format:
        """Return the format that a tensor is cast to."""
        return FORMATS[self.fp8_format][tensor == "output_grad"]

    def gradient_dtype(self, kernel: np.dtype) -> np.dtype:
        """Return the dtype of the unscaled gradient of a kernel.

        Args:
            kernel: dtype of the kernel.
        """
        # bfloat16 is the only 16-bit dtype here, because sums of codes overflow float16.
        half = self.kernel_gradient == "kernel" and kernel == jnp.bfloat16
        return np.dtype(jnp.bfloat16 if half else np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DelayedScaling(Scaling):
    """Delayed scaling: scales come from the amax of earlier steps.

    Each matmul needs the leaves of `init_meta`. While the reduced history is zero, the previous scale is kept, 1 at
    first. An infinite or NaN amax is not recorded.

    Attributes:
        amax_history_length: Number of observations in the history, at least 1.
        margin: Headroom in powers of two: the scale maps amax to `max * 2^-margin` of the format. An integer from -16
            to 16.
        amax_compute_algo: Reduction of the history: its maximum ("max") or its newest entry ("most_recent").
        fp8_format: Formats. "HYBRID" is E4M3 forward and E5M2 for output gradients, "E4M3" is E4M3 for all tensors.
            "HYBRID_FNUZ" and "E4M3_FNUZ" are the formats of AMD MI300.
        kernel_gradient: dtype of the matmul for the gradient of a kernel, before it is scaled. XLA sums the parts of
            several devices in this dtype. "kernel" is bfloat16 for bfloat16 kernels, as in flax, and float32 for
            others. "float32" doubles the reduced bytes of bfloat16 kernels, and rounds once less.

    Raises:
        Fp8Error: If a field has an unsupported value.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> scaling = owg.DelayedScaling(amax_history_length=16, amax_compute_algo="most_recent")
        >>> meta = owg.init_meta(scaling)
        >>> y = owg.fp8_einsum("bi,io->bo", jnp.ones((4, 16)), jnp.ones((16, 8)), meta=meta, scaling=scaling)
        >>> float(y[0, 0])
        16.0
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
        """Scale policy of `fp8_common` with these settings."""
        length, algo = self.amax_history_length, self.amax_compute_algo
        return dataclasses.replace(CANONICAL, margin=self.margin, history=length, algo=algo)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CurrentScaling(Scaling):
    """Current scaling: scales come from the amax of the tensor itself.

    It needs no state. The scale is 1 for an amax of zero, infinity or NaN.

    Attributes:
        granularity: "tensor" for one scale per tensor, or "row" for one scale per slice along the dimensions that a
            matmul sums over. The backward sums over other dimensions, so "row" saves the operands in their own
            precision, or their codes for the backward, if GPU kernels make both at once.
        power_of_2: Whether to round scales down to powers of two.
        fp8_format: As in `DelayedScaling`.
        kernel_gradient: As in `DelayedScaling`.

    Raises:
        Fp8Error: If a field has an unsupported value.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> scaling = owg.CurrentScaling(granularity="row", power_of_2=True)
        >>> y = owg.fp8_einsum("bi,io->bo", jnp.ones((4, 16)), jnp.ones((16, 8)), scaling=scaling)
        >>> float(y[0, 0])
        16.0
    """

    granularity: Granularity = "tensor"
    power_of_2: bool = False

    @property
    def policy(self) -> ScalePolicy:
        """Scale policy of `fp8_common` with these settings."""
        return POWER_OF_2 if self.power_of_2 else CANONICAL


ScalingChoice = Scaling | Recipe | str | Mapping[str, Any]
"""Type of `scaling` arguments: a scaling, a recipe, its name, or its dictionary from `Recipe.to_dict`."""
RulesOrFilter = Rules | Iterable[str | Rule] | Callable[[Any, str], bool]
"""Type of `rules` arguments, which select layers: rules for names, or a function `(layer, name) -> bool`."""
OPERANDS: dict[Literal["output", "grad_input", "grad_weight"], tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""Names of the operands of a layer's three matmuls, in the order of `Recipe.operands`."""


def as_scaling(choice: ScalingChoice) -> Scaling:
    """Return the scaling of a recipe; a scaling is returned unchanged.

    Raises:
        Fp8Error: If the name or the dictionary describes no recipe, or the layers of this package do not support a
            field of the recipe. The message names the field.
    """
    if isinstance(choice, Scaling):
        return choice
    recipe = get_recipe(choice)
    scaling = _nearest(recipe)
    supported = recipe_of(scaling)
    for matmul, names in OPERANDS.items():
        for name, *casts in zip(names, recipe.operands(matmul), supported.operands(matmul), strict=True):
            requested, available = map(_fields, casts)
            if field := next((field for field in requested if requested[field] != available[field]), None):
                raise Fp8Error(
                    f"Layers of fp8_jax_owg do not support recipe {recipe.name!r}: in the matmul {matmul!r}, {name} "
                    f"has {field}={requested[field]!r}, and the nearest supported recipe has {available[field]!r}. "
                    "Supported: one delayed or dynamic scaling for all operands, tensorwise, or rowwise with dynamic "
                    "scaling. Use the recipe tensorwise, tensorwise_delayed or rowwise, or change this field."
                )
    return scaling


def recipe_of(scaling: Scaling) -> Recipe:
    """Return the recipe that describes a scaling."""
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
    """Return the scaling that is nearest to a recipe.

    It follows the recipe's input cast, from which the other casts may differ.
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
    """Return fields of a cast and its policy, except the policy's name."""
    fields = dataclasses.asdict(cast)
    return fields | {f"policy.{name}": value for name, value in fields.pop("policy").items() if name != "name"}
