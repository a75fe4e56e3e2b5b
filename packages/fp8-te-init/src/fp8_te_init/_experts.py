"""`PrimaryFloat8Experts`: the weights of many experts in one FP8 parameter [experts, out_features, in_features]."""

import math

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Recipe
from fp8_common.torch import INPUT_DTYPES
from fp8_te_init._choices import check_choice, resolve_config
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._holder import PrimaryWeightHolder, draw_uniform
from fp8_te_init._kept_in_module import reconcile, register
from fp8_te_init._kept_values import KeptValues, Release, keeper
from fp8_te_init._release import ReleaseGroup
from fp8_te_init._sources import Preserve
from fp8_te_init._state_dict import keep_scales_in_state_dicts
from fp8_te_init._weight import PrimaryFloat8Weight, primary_of


class PrimaryFloat8Experts(PrimaryWeightHolder):
    """Stacked expert weights as FP8 codes: each expert has the scales that its weight would have alone.

    Products run in high precision, on dequantized values. Under `fully_shard` the experts are shared out among ranks
    for storage, and gathered as codes.

    Args:
        weight: [experts, out_features, in_features], float32, bfloat16 or float16; a copy in FP8 is kept.
        recipe: Name, `Recipe` or dictionary of the casts; "tensorwise" by default. Delayed scaling is refused.
        config: All choices at once, instead of a recipe.
        preserve: How the values before rounding are kept; see `primary_weights`. What cannot be kept otherwise for
            stacks ("residual", "replay") is kept as a copy.
        release: When they are dropped; see `primary_weights`.

    Raises:
        Fp8Error: Unknown choices, another number of dimensions, or values that cannot be quantized.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        recipe: str | Recipe | None = None,
        config: PrimaryConfig | None = None,
        preserve: Preserve = "cpu",
        release: Release = "seed",
    ) -> None:
        super().__init__()
        self.config = resolve_config(recipe, config)
        check_choice("preserve", preserve, Preserve)
        check_choice("release", release, Release)
        _check(weight, self.config)
        keep_scales_in_state_dicts(self)
        primary = PrimaryFloat8Weight.empty(
            weight.shape, self.config.weight, dtype=weight.dtype, device=weight.device, gather=self.config.gather
        )
        kept = KeptValues(preserve)
        if not weight.is_meta:
            primary.state.write(weight.detach(), keeper(kept, primary.quantized_rows))
        parameter = nn.Parameter(primary, requires_grad=weight.requires_grad or not isinstance(weight, nn.Parameter))
        super().register_parameter("weight", parameter)
        register(self, "weight", parameter, kept, ReleaseGroup(release))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; "weight" stays FP8.

        Raises:
            Fp8Error: Plain values for "weight".
        """
        if name == "weight" and primary_of(param) is None and not hasattr(param, "codes"):
            raise Fp8Error("The weight of PrimaryFloat8Experts stays FP8: copy values into it (weight.copy_).")
        super().register_parameter(name, param)
        if name == "weight" and primary_of(param) is not None:
            reconcile(self, name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.transpose(1, 2), expert by expert.

        Args:
            input: [experts, tokens, in_features].

        Returns:
            [experts, tokens, out_features] in the dtype of `input`.

        Raises:
            Fp8Error: The weight is distributed and not gathered.
        """
        if isinstance(self.weight, DTensor):
            raise Fp8Error("Stacked FP8 weights are gathered by fully_shard: call the model, not a sharded part of it.")
        return torch.bmm(input, self.weight.to(input.dtype).transpose(1, 2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert as `nn.Linear` is initialized; every rank draws all of them and takes its own."""
        primary = primary_of(self.weight)
        if primary is None or primary.is_meta:
            return
        draw_uniform(primary, 1 / math.sqrt(max(1, primary.state.full_shape[-1])))
        increment_version(self.weight)

    def extra_repr(self) -> str:
        """Show shape and cast."""
        cast = self.config.weight
        return f"{tuple(self.weight.shape)}, primary={cast.scaling} {cast.granularity} {cast.format}"


def _check(weight: torch.Tensor, config: PrimaryConfig) -> None:
    if weight.ndim != 3 or isinstance(weight, DTensor) or weight.dtype not in INPUT_DTYPES:
        raise Fp8Error(
            f"PrimaryFloat8Experts takes plain weights [experts, out_features, in_features] of float32, bfloat16 or "
            f"float16, got {type(weight).__name__} of {tuple(weight.shape)}, {weight.dtype}."
        )
    if config.weight.scaling == "delayed":
        raise Fp8Error("Stacked expert weights have no delayed scaling: use a dynamic recipe.")
