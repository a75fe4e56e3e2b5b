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
    """Tokens received by the experts of this rank; the result of `dispatch_tokens`.

    Attributes:
        rows: `RowCodes` [rows, features], FP8 codes with a scale per row, sorted by expert.
        offsets: int32 [local experts], index of the end of each expert's rows.
        counts: int64 [local experts], number of rows of each expert.
        order: int64 [tokens * k], flat indices of this rank's (token, slot) pairs, sorted by expert.
        slots: Number k of experts per token.
        route: Numbers of rows exchanged between ranks, and their order.
        grad_cast: Cast of gradients.
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
        """Return the outputs of experts to the tokens of this rank.

        Collective: all ranks of the group call this, and run its backward.

        Args:
            y: [rows, out_features], outputs in the order of `rows`.

        Returns:
            [tokens, k, out_features] in the dtype of `y`, in the order of `chosen`. Multiply them by the scores of the
            router, and sum over k.

        Raises:
            Fp8Error: If `y` is not [rows, out_features].
        """
        routed = self.combine_sorted(y)
        return routed.index_select(0, inverse(self.order)).view(-1, self.slots, y.shape[1])

    @disable_compiler
    def combine_sorted(self, y: torch.Tensor) -> torch.Tensor:
        """Return outputs of experts [tokens * k, out_features], sorted by expert.

        Collective, like `combine`. The rows are in the order of `order`, for dispatchers that apply scores there.
        """
        if y.ndim != 2 or len(y) != len(self.rows):
            raise Fp8Error(f"combine expects [{len(self.rows)}, out_features], got {tuple(y.shape)}.")
        return FromExperts.apply(y, self.route, self.grad_cast)


@disable_compiler
def dispatch_tokens(
    x: torch.Tensor, chosen: torch.Tensor, experts: Any, group: dist.ProcessGroup | DeviceMesh
) -> DispatchedTokens:
    """Send tokens to the ranks of their experts as FP8 codes.

    Collective: all ranks of the group call this in the same order, including ranks without tokens.

    Each token is cast once, before it is copied for its experts, and the experts multiply the received codes. The
    outputs are bit-identical to those of an all-to-all of high-precision rows. The gradients of outputs are sent as
    codes, too: gradients equal those of an all-to-all of rows rounded by the same cast. The gradient of the weights is
    defined on the columns of the decoded rows.

    Args:
        x: bfloat16, float16 or float32 [tokens, features], the tokens of this rank. Under autocast they are first
            converted to the autocast dtype.
        chosen: int32 or int64 [tokens, k], the experts of each token, numbered over all ranks of the group: rank r
            holds the experts r * n to r * n + n - 1, where n is the number of experts per rank.
        experts: Experts of this rank, converted with the recipe "rowwise".
        group: Ranks that hold different experts.

    Returns:
        The rows received by the experts of this rank. Their `combine` returns outputs to the tokens.

    Raises:
        Fp8Error: If the experts are not in FP8, or their recipe does not support rows as codes. On all ranks, if `x` or
            `chosen` is invalid on one of them.

    Examples:
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

        With experts of any layout, on one rank:

        >>> import torch.distributed as dist
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(4, 64, 64))
        >>> def grouped_forward(module, x, offsets):
        ...     return module.expert_matmul("weight", x, offsets)
        >>> layouts = {Experts: ExpertLayout(forward=grouped_forward)}
        >>> experts = convert_to_float8_training(Experts(), recipe="rowwise", experts=layouts)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mixture = Mixture(nn.Linear(64, 4), experts, dist.group.WORLD)
        >>> mixture(torch.randn(8, 64)).shape
        torch.Size([8, 64])
        >>> dist.destroy_process_group()
    """
    config = _config_of(experts)
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    weight = experts._parameters[experts.fp8_layout.weights[0]]
    total = weight.shape[0] * (1 if _is_sharded_over(weight, process_group) else process_group.size())
    header, counts, ids = _checked(x, chosen, total, weight.device)
    route = plan_route(counts, header, process_group)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    order = torch.argsort(ids, stable=True)
    rows = ToExperts.apply(x, order, route, config.input)
    offsets = route.counts.cumsum(0, dtype=torch.int32)
    return DispatchedTokens(rows, offsets, route.counts, order, chosen.shape[1], route, config.grad_output)


def _is_sharded_over(weight: Any, group: dist.ProcessGroup) -> bool:
    """Return whether a weight is a DTensor sharded over the group's ranks."""
    if not isinstance(weight, DTensor):
        return False
    ranks, mesh = dist.get_process_group_ranks(group), weight.device_mesh
    return any(
        placement.is_shard() and dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
        for dim, placement in enumerate(weight.placements)
    )


def _config_of(experts: Any) -> Any:
    """Return the configuration of experts; raise if they do not support codes."""
    if not isinstance(experts, Float8Experts):
        raise Fp8Error(
            f"dispatch_tokens sends rows to experts in FP8, got {type(experts).__name__}. Convert them first: "
            "convert_to_float8_training(model, recipe='rowwise')."
        )
    experts.fp8_config.check_row_codes(type(experts).__name__)
    return experts.fp8_config


def _checked(x: Any, chosen: Any, total: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a header, counts, and the expert of each slot.

    Args:
        x: As for `dispatch_tokens`.
        chosen: As for `dispatch_tokens`.
        total: Number of experts of all ranks.
        device: Device of the results if the inputs are invalid.

    Returns:
        - int64 scalar, the header for `plan_route`: `signature(x)`, or a key of `PROBLEMS`.
        - int64 [total], number of rows for each expert.
        - int64 [tokens * k], the expert of each slot.
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
    # Invalid expert numbers are counted in one more place, which the host reads together with the header.
    places = torch.where((ids >= 0) & (ids < total), ids, total)
    counts = ids.new_zeros(total + 1).scatter_add_(0, places, torch.ones_like(ids))
    header = torch.where(counts[total] > 0, -3, signature(x))
    return header, counts[:total], ids
