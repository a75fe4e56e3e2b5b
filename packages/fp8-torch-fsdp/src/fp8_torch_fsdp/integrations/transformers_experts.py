"""`register_fp8_dispatch`: Transformers' expert parallelism with tokens sent as FP8 codes.

Transformers builds expert parallelism before it shards the model with FSDP2 and loads the weights. Therefore the
implementation converts the experts when it is built.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8UnsupportedError, Recipe
from fp8_torch_fsdp.config import Float8TrainingConfig
from fp8_torch_fsdp.convert.model import convert_to_float8_training
from fp8_torch_fsdp.expert_parallel.dispatch import dispatch_tokens

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise Fp8UnsupportedError(
        "fp8_torch_fsdp.integrations.transformers_experts needs a Transformers whose expert parallelism has "
        f"implementations by name, 5.24 or later ({error}). Install it, or call dispatch_tokens in your forward."
    ) from error


def register_fp8_dispatch(name: str = "fp8", *, recipe: str | Recipe | Mapping[str, Any] = "rowwise") -> None:
    """Register FP8 dispatch as an implementation of Transformers' expert parallelism.

    Call it on all ranks before the model is loaded.

    Args:
        name: Name of the implementation for `DistributedConfig.ep_implementation`.
        recipe: Recipe of the experts. FSDP2 gathers their weights in high precision, because Transformers loads weights
            into parameters that are already sharded.

    Raises:
        Fp8Error: If the recipe does not support rows as codes.

    Examples:
        >>> register_fp8_dispatch()
        >>> config = DistributedConfig(ep_size=2, fsdp_size=4, ep_implementation="fp8")
        >>> model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    """
    config = Float8TrainingConfig(recipe=recipe, all_gather=False)  # pyrefly: ignore[bad-argument-type]
    config.check_row_codes(name)
    EPImplementationInterface.register(name, type("Float8EP", (CodesEP,), {"fp8_config": config}))


class CodesEP(EPImplementation):
    """Expert parallelism with FP8 experts that receive tokens as codes."""

    fp8_config: Float8TrainingConfig

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        """Convert the experts of this rank.

        Raises:
            Fp8UnsupportedError: If several ranks hold the same tokens, because of tensor parallelism.
        """
        if tp_mesh.size() > 1:
            raise Fp8UnsupportedError(
                f"Dispatch in FP8 codes needs tp_size=1, got {tp_mesh.size()}: ranks with the same tokens would send "
                "each of them several times. Set tp_size=1, or use ep_implementation='all_to_all'."
            )
        convert_to_float8_training(experts, config=self.fp8_config)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, features]."""
        tokens = dispatch_tokens(hidden_states, top_k_index, self.experts, self.ep_mesh)
        local = torch.arange(len(tokens.counts), device=tokens.counts.device)
        ids = local.repeat_interleave(tokens.counts, output_size=len(tokens.rows))[:, None]
        # Each row is computed as a token with one expert and weight 1. The router's weights are applied on the rank of
        # the token.
        y = self.experts_forward(tokens.rows, ids, torch.ones_like(ids, dtype=tokens.rows.dtype))
        return (tokens.combine(y) * top_k_weights[..., None]).sum(1)
