"""Differentiable all-to-alls of expert parallelism: FP8 codes and high-precision sums.

Inputs of experts, and gradients of their outputs, are operands of matmuls: they are sent as the codes
of these matmuls. Data that is summed afterwards is sent in its own dtype.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch_layers.linear.row_codes import pack_rows, unpack_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of rows, by the number that ranks exchange."""
PROBLEMS = {
    -1: "x must be a matrix [tokens, features] in bfloat16, float16 or float32",
    -2: "chosen must be int32 or int64 [tokens, k] on the device of x, with one row for each token",
    -3: "chosen must hold numbers of experts, from 0 to {last}",
}
"""Mistakes of one rank, indexed by the number that ranks exchange."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Destinations of all ranks' rows.

    Attributes:
        group: The ranks.
        sent: How many rows go to each rank.
        received: How many rows come from each rank.
        order: int64 [received rows]: the index of the received row at each place once sorted by expert.
        back: int64 [received rows], the inverse.
        counts: int64 [local experts]: the rows of each expert.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    back: torch.Tensor
    counts: torch.Tensor

    def exchange(self, rows: torch.Tensor, *, forth: bool) -> torch.Tensor:
        """Send rows [n, columns] to or from experts; return received rows."""
        give, take = (self.sent, self.received) if forth else (self.received, self.sent)
        got = rows.new_empty((sum(take), *rows.shape[1:]))
        dist.all_to_all_single(got, rows.contiguous(), take, give, group=self.group)
        return got


def plan_route(counts: torch.Tensor, header: torch.Tensor, group: dist.ProcessGroup) -> Route:
    """Exchange how many rows each expert gets. The host waits once.

    Collective: all ranks of the group call this, also those with bad input, so that all of them raise.

    Args:
        counts: int64 [experts of all ranks]: this rank's rows for each.
        header: int64 scalar: columns and dtype of this rank's rows (`signature`), or a key of `PROBLEMS`.
        group: The ranks, each with equally many experts, in their order.

    Raises:
        Fp8Error: If the input of a rank is bad, or ranks send rows of different widths or dtypes.
    """
    ranks = group.size()
    mine = torch.cat([header.expand(ranks, 1), counts.view(ranks, -1)], 1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    headers, sent, received = torch.stack([theirs[:, 0], mine[:, 1:].sum(1), theirs[:, 1:].sum(1)]).tolist()
    _check_headers(headers, last=counts.numel() - 1)
    # rows are received by rank, then by expert; experts need them by expert, then by rank
    local = theirs.shape[1] - 1
    expert = torch.arange(local, device=counts.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs[:, 1:].reshape(-1), output_size=sum(received))
    order = torch.sort(expert, stable=True).indices
    return Route(group, sent, received, order, inverse(order), theirs[:, 1:].sum(0))


def signature(x: torch.Tensor) -> int:
    """Return columns and dtype of rows as one number."""
    return x.shape[1] * len(DTYPES) + DTYPES.index(x.dtype)


def _check_headers(headers: list[int], last: int) -> None:
    if any(number < 0 for number in headers):
        mistakes = "; ".join(
            f"rank {rank}: {PROBLEMS[number].format(last=last)}" for rank, number in enumerate(headers) if number < 0
        )
        raise Fp8Error(f"dispatch_tokens got bad input on a rank of the group, so no rank sends tokens: {mistakes}.")
    if len(set(headers)) > 1:
        sizes = (divmod(number, len(DTYPES)) for number in headers)
        mistakes = ", ".join(f"{columns} features in {str(DTYPES[dtype])[6:]}" for columns, dtype in sizes)
        raise Fp8Error(
            f"dispatch_tokens needs rows of one width and dtype on all ranks of the group, got {mistakes}, by rank."
        )


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 [n]."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class ToExperts(torch.autograd.Function):
    """Send tokens to their experts as codes; gradients are summed.

    Gradients return in their own dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, route: Route, cast: CastRecipe) -> torch.Tensor:
        """Return the rows by expert, `RowCodes`.

        Args:
            ctx: Of autograd.
            x: [tokens, features].
            order: int64 [tokens * k], of all (token, slot) sorted by expert.
            route: Where they go.
            cast: Of each row, once, before a token is copied for its experts.
        """
        ctx.route, ctx.tokens, ctx.slots = route, len(x), order.numel() // max(len(x), 1)
        ctx.save_for_backward(order)
        message = pack_rows(x, cast).index_select(0, order // max(ctx.slots, 1))
        return unpack_rows(route.exchange(message, forth=True), x.shape[1], cast, x.dtype, route.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the tokens."""
        (order,) = ctx.saved_tensors
        rows = ctx.route.exchange(grad.index_select(0, ctx.route.back), forth=False)
        # a sum in a fixed order, where an addition by index would have none on GPUs
        slots = rows.index_select(0, inverse(order)).view(ctx.tokens, ctx.slots, rows.shape[1])
        return slots.sum(1), None, None, None


class FromExperts(torch.autograd.Function):
    """Return expert outputs to their tokens, in the order of `ToExperts`.

    Gradients are sent as codes.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, route: Route, cast: CastRecipe) -> torch.Tensor:
        """Return [tokens * k, features], sorted by expert."""
        ctx.route, ctx.cast = route, cast
        return route.exchange(y.index_select(0, route.back), forth=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the rows by expert, `RowCodes`."""
        message = ctx.route.exchange(pack_rows(grad.contiguous(), ctx.cast), forth=True)
        return unpack_rows(message, grad.shape[1], ctx.cast, grad.dtype, ctx.route.order), None, None
