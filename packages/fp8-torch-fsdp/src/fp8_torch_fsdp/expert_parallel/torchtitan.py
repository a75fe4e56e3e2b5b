"""`dispatch_in_codes`: torchtitan's all-to-all dispatcher with rows as FP8 codes.

The dispatcher of each mixture gets a subclass of its class, which calls `dispatch_tokens`. torchtitan's further
processing of the outputs, by weights and sums, does not change. torchtitan is not imported.
"""

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_torch_fsdp.expert_parallel.dispatch import DispatchedTokens, dispatch_tokens
from fp8_torch_fsdp.layers.experts import Float8Experts

ALL_TO_ALL = "AllToAllTokenDispatcher.dispatch"
LOCAL = "LocalTokenDispatcher"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SentTokens:
    """Metadata for a dispatcher's `combine`, under torchtitan's names.

    Attributes:
        tokens: Result of `dispatch_tokens`.
        token_indices_experts_sorted_N: int64 [tokens * k], index of the token of each row that this rank has sent.
        topk_scores_experts_sorted_N: [tokens * k], score of each row that this rank has sent.
    """

    tokens: DispatchedTokens
    token_indices_experts_sorted_N: torch.Tensor
    topk_scores_experts_sorted_N: torch.Tensor


class CodesDispatcher:
    """torchtitan dispatcher that sends rows to other ranks as codes."""

    ep_mesh: Any
    experts: Float8Experts

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> tuple:
        """Return rows and counts of this rank's experts, and metadata for `combine`.

        The arguments are torchtitan's.
        """
        if self.ep_mesh is None:
            return super().dispatch(x, scores, chosen, counts)  # pyrefly: ignore[missing-attribute]
        tokens = dispatch_tokens(x, chosen, self.experts, self.ep_mesh)
        ordered = scores.reshape(-1)[tokens.order]
        return tokens.rows, tokens.counts, SentTokens(tokens, tokens.order // tokens.slots, ordered)

    def combine(self, routed: torch.Tensor, metadata: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        if not isinstance(metadata, SentTokens):
            return super().combine(routed, metadata, x, *args, **options)  # pyrefly: ignore[missing-attribute]
        local: Any = next(base for base in type(self).__mro__ if base.__name__ == LOCAL)
        return local.combine(self, metadata.tokens.combine_sorted(routed), metadata, x, *args, **options)


def dispatch_in_codes(model: nn.Module) -> nn.Module:
    """Make torchtitan's mixtures send tokens to experts as FP8 codes, in place.

    `Float8Converter.Config(dispatch_in_codes=True)` calls it for models that torchtitan builds. Dispatchers of other
    classes, for example of DeepEP, do not change.

    Args:
        model: Converted model.

    Returns:
        `model`.

    Raises:
        Fp8Error: If the model has no all-to-all dispatcher, or the experts of one are not in FP8 or have a recipe that
            does not support rows as codes.
    """
    replaced = False
    for name, module in model.named_modules():
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if getattr(type(dispatcher).__dict__.get("dispatch"), "__qualname__", "") != ALL_TO_ALL:
            continue
        experts = next(
            (submodule for submodule in module.modules() if isinstance(submodule, Float8Experts)),
            None,
        )
        owner = f"The module of experts {name or type(module).__name__}"
        if experts is None:
            raise Fp8Error(
                f"{owner} does not support rows as FP8 codes: its experts are not in FP8. Convert them with "
                "recipe='rowwise', or leave dispatch_in_codes out."
            )
        experts.fp8_config.check_row_codes(owner)
        dispatcher.__class__ = _in_codes(type(dispatcher))
        dispatcher.experts = experts
        replaced = True
    if not replaced:
        raise Fp8Error(
            "dispatch_in_codes found no module with torchtitan's all-to-all dispatcher as its token_dispatcher."
        )
    return model


@cache
def _in_codes(cls: type) -> type:
    return type(f"Float8{cls.__name__}", (CodesDispatcher, cls), {"__module__": cls.__module__})
