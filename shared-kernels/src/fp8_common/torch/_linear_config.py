"""`LinearConfig` of `linear.config` with questions about it that layers ask which do not use `fp8_linear` yet."""

import dataclasses

from fp8_common.torch.linear import config
from fp8_common.torch.linear.config import GemmConfig as GemmConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig(config.LinearConfig):
    """How linear layers compute in FP8; see `linear.config.LinearConfig`."""

    @property
    def folds_weight_scales(self) -> bool:
        """Whether rows of the weight have their own scales, which the backward folds into the gradient."""
        return self.shared.folds

    @property
    def input_has_one_cast(self) -> bool:
        """Whether one cast of the activation serves the output and the weight's gradient."""
        return self.shared.input == "codes"

    @property
    def input_is_cast_alike(self) -> bool:
        """Whether the activation is cast by rows for the output, and by columns for the weight's gradient, alike."""
        return self.shared.input == "columns"

    @property
    def gradient_is_cast_alike(self) -> bool:
        """Whether the output's gradient is cast by rows and by columns alike, scales of the weight folded in or not."""
        return self.shared.grad_output == "columns"

    @property
    def gradient_has_one_cast(self) -> bool:
        """Whether one cast of the output's gradient serves the gradients of input and weight."""
        return self.shared.grad_output == "codes"

    @property
    def gradient_has_one_scale(self) -> bool:
        """Whether the output's gradient is cast with one scale, as it is: no scales of the weight folded in."""
        return self.shared.one_gradient_scale
