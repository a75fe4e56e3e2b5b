"""`dispatch_tokens`: sends tokens to the ranks of their experts as FP8 codes."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.compat import disable_compiler
from fp8_torch_fsdp.expert_parallel.exchange import (
    DTYPES,
    FromExperts,
    Route,
    ToExperts,
    inverse,
    plan_route,
    signature,
)
from fp8_torch_fsdp.layers.experts import Float8Experts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchedTokens:
    """Tokens received by the experts of this rank.

    Attributes:
        rows: [rows, features], sorted by expert: `RowCodes`, FP8 codes with the scale of each row.
        offsets: int32 [local experts]: where the rows of each expert end.
        counts: int64 [local experts]: how many rows each expert has.
        order: int64 [tokens * k]: the (token, slot) pairs of this rank, sorted by expert.
        slots: k, how many experts a token has.
        route: Where rows go.
        grad_cast: How gradients are cast.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor
    slots: int
    route: Route
    grad_cast: CastRecipe

    @disable_compiler
    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Return the expert outputs for each token of this rank.

        Collective: all ranks of the group call this, and its backward.

        Args:
            y: [rows, out_features], of the rows as they came.

        Returns:
            [tokens, k, out_features] in the dtype of `y`, in the order of `chosen`: weight them and sum them over k.

        Raises:
            Fp8Error: If `y` has another number of rows.
        """
        routed = self.combine_sorted(y)
        return routed.index_select(0, inverse(self.order)).view(-1, self.slots, y.shape[1])

    @disable_compiler
    def combine_sorted(self, y: torch.Tensor) -> torch.Tensor:
        """Return `combine` as [tokens * k, out_features] in the order of `order`.

        For dispatchers that apply weights there.
        """
        if y.ndim != 2 or len(y) != len(self.rows):
            raise Fp8Error(f"combine expects [{len(self.rows)}, out_features], got {tuple(y.shape)}.")
        return FromExperts.apply(y, self.route, self.grad_cast)


@disable_compiler
def dispatch_tokens(
    x: torch.Tensor, chosen: torch.Tensor, experts: Any, group: dist.ProcessGroup | DeviceMesh
) -> DispatchedTokens:
    """Send tokens to the ranks of their experts as FP8 codes.

    Each token is cast once, before it is copied for its experts, and the experts multiply the received codes: the
    outputs equal an all-to-all of high-precision rows, bit for bit. The gradients of outputs are sent as codes too:
    gradients equal an all-to-all of rows rounded by the same cast. The gradient of the weights is defined on the
    columns of the decoded rows.

    Collective: all ranks of the group call this in the same order, also those without tokens.

    Example:
        >>> from torch import nn
        >>> class Mixture(nn.Module):
        ...     def __init__(self, router, experts, group):
        ...         super().__init__()
        ...         self.router, self.experts, self.group = router, experts, group
        ...
        ...     def forward(self, x):
        ...         scores, chosen = self.router(x).softmax(-1).topk(2)
        ...         tokens = dispatch_tokens(x, chosen, self.experts, self.group)
        ...         y = tokens.combine(self.experts(tokens.rows, tokens.offsets))
        ...         return (y * scores[..., None]).sum(1)

    Args:
        x: bfloat16, float16 or float32 [tokens, features]: this rank's tokens. Under autocast they are converted first.
        chosen: int32 or int64 [tokens, k]: the experts of each token, counted over all ranks of the group: rank r holds
            those from r * n on, where n is the number of experts of a rank.
        experts: This rank's experts, converted with recipe "rowwise".
        group: The ranks that hold different experts.

    Returns:
        The rows at this rank's experts, and the way back.

    Raises:
        Fp8Error: If the experts are not in FP8 or their recipe cannot take rows as codes; on all ranks, if `x` or
            `chosen` does not fit on one of them.
    """
    config = _config_of(experts)
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    weight = experts._parameters[experts.fp8_layout.weights[0]]
    total = weight.shape[0] * (1 if _is_cut_over(weight, process_group) else process_group.size())
    header, counts, ids = _checked(x, chosen, total, weight.device)
    route = plan_route(counts, header, process_group)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    order = torch.argsort(ids, stable=True)
    rows = ToExperts.apply(x, order, route, config.input)
    offsets = route.counts.cumsum(0, dtype=torch.int32)
    return DispatchedTokens(rows, offsets, route.counts, order, chosen.shape[1], route, config.grad_output)


def _is_cut_over(weight: Any, group: dist.ProcessGroup) -> bool:
    """Return whether all experts' stack is one tensor over the group."""
    if not isinstance(weight, DTensor):
        return False
    ranks, mesh = dist.get_process_group_ranks(group), weight.device_mesh
    return any(
        placement.is_shard() and dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
        for dim, placement in enumerate(weight.placements)
    )


def _config_of(experts: Any) -> Any:
    """Return the configuration of experts that can take rows as codes."""
    if not isinstance(experts, Float8Experts):
        raise Fp8Error(
            f"dispatch_tokens sends rows to experts in FP8, got {type(experts).__name__}. Convert them first: "
            "convert_to_float8_training(model, recipe='rowwise')."
        )
    experts.fp8_config.check_row_codes(type(experts).__name__)
    return experts.fp8_config


def _checked(x: Any, chosen: Any, total: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the header for the exchange, and all slots' experts.

    The header has int64 [total] rows for each expert.
    """
    problem = 0
    if not (isinstance(x, torch.Tensor) and x.ndim == 2 and x.dtype in DTYPES):
        problem = -1
    elif not (
        isinstance(chosen, torch.Tensor)
        and chosen.dtype in (torch.int32, torch.int64)
        and chosen.ndim == 2
        and (len(chosen), chosen.device) == (len(x), x.device)
    ):
        problem = -2
    if problem:
        empty = torch.zeros(total, dtype=torch.int64, device=device)
        return empty.new_full((), problem), empty, empty[:0]
    ids = chosen.reshape(-1).long()
    # one more for numbers that are no experts: the host looks at them with the counts
    places = torch.where((ids >= 0) & (ids < total), ids, total)
    counts = ids.new_zeros(total + 1).scatter_add_(0, places, torch.ones_like(ids))
    header = torch.where(counts[total] > 0, -3, signature(x))
    return header, counts[:total], ids
