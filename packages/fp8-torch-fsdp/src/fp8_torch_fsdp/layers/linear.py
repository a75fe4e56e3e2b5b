"""`Float8Linear`: a linear layer that computes in FP8."""

import torch
from torch import nn

from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.gathered import GatheredWeight
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.config import Float8TrainingConfig
from fp8_torch_fsdp.layers.module import Float8Module, WeightLayout
from fp8_torch_fsdp.scales.delayed import DelayedScale


class Float8Linear(Float8Module, nn.Linear):
    """Linear layer whose three matmuls run in FP8.

    `convert_to_float8_training` creates it. Under FSDP2, the weight is gathered as FP8 codes; otherwise it is cast in
    the forward. The layer has the parameters, gradients and state dicts of `nn.Linear`.

    Attributes:
        fp8_input: Delayed scale of the input; None for other scaling.
        fp8_weight: Delayed scale of the weight; None for other scaling.
        fp8_grad_output: Delayed scale of the output gradient; None for other scaling.
    """

    fp8_input: DelayedScale | None
    fp8_weight: DelayedScale | None
    fp8_grad_output: DelayedScale | None

    @property
    def config(self) -> Float8TrainingConfig:
        """Configuration of casts, matmuls and gathers."""
        return self.fp8_config

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Returns:
            [..., out_features] in the dtype of `input` (the autocast dtype under autocast).

        Raises:
            Fp8Error: If the last dimension is not `in_features`, or the weight is distributed and not gathered.
        """
        # calls `fp8_matmul`, between the communication of tensor parallelism if there is any
        return self.fp8_strategy.forward(self, input)

    def extra_repr(self) -> str:
        """Return the description of `nn.Linear` with casts and all-gather."""
        local = local_of(self.weight)
        # Under `fully_shard_traceable`, the weight is plain and the strategy gathers codes.
        codes = isinstance(local, ShardedFloat8Weight | GatheredWeight) or getattr(self.fp8_strategy, "in_fp8", False)
        gathered = "fp8" if codes and self.config.all_gather else "high precision"
        cast = self.config.weight
        base = nn.Linear.extra_repr(self)
        return f"{base}, fp8={cast.scaling} {cast.granularity} {cast.format}, all_gather={gathered}"


LINEAR = WeightLayout(forward=Float8Linear.forward)
"""Layout of `nn.Linear`."""
