"""Differentiable all-to-alls of expert parallelism, in FP8 for operands of matmuls.

Inputs of experts and gradients of their outputs are operands of matmuls, and are sent as the codes of these matmuls.
Outputs of experts and gradients of their inputs are summed afterwards, and are sent in their own dtype.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch_layers.linear.row_codes import pack_rows, unpack_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes of rows; ranks exchange the index."""
PROBLEMS = {
    -1: "x must be a matrix [tokens, features] in bfloat16, float16 or float32",
    -2: "chosen must be int32 or int64 [tokens, k] on the device of x, with one row for each token",
    -3: "chosen must hold numbers of experts, from 0 to {last}",
}
"""Errors in the input of a rank, by the number that ranks exchange."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Numbers and order of rows that this rank exchanges with others.

    Attributes:
        group: Ranks that exchange rows.
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        order: int64 [received rows], permutation that sorts the received rows by expert.
        back: int64 [received rows], inverse of `order`.
        counts: int64 [local experts], number of rows of each expert.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    back: torch.Tensor
    counts: torch.Tensor

    def exchange(self, rows: torch.Tensor, *, forth: bool) -> torch.Tensor:
        """Exchange rows [n, columns] and return the received rows.

        Args:
            rows: Rows in the order of ranks.
            forth: Whether rows are sent to experts; else to their tokens.
        """
        send_counts, receive_counts = (self.sent, self.received) if forth else (self.received, self.sent)
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=self.group)
        return received


def plan_route(counts: torch.Tensor, header: torch.Tensor, group: dist.ProcessGroup) -> Route:
    """Exchange the numbers of rows for each expert; plan their order.

    Collective: all ranks of the group call this, including ranks with invalid input, so that all of them raise. The
    host waits for the device once.

    Args:
        counts: int64 [experts of all ranks], number of this rank's rows for each expert.
        header: int64 scalar, `signature` of this rank's rows, or a key of `PROBLEMS`.
        group: Ranks, each with the same number of experts, in the order of experts.

    Raises:
        Fp8Error: If the input of a rank is invalid, or ranks send rows of different widths or dtypes.
    """
    ranks = group.size()
    mine = torch.cat([header.expand(ranks, 1), counts.view(ranks, -1)], 1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    headers, sent, received = torch.stack([theirs[:, 0], mine[:, 1:].sum(1), theirs[:, 1:].sum(1)]).tolist()
    _check_headers(headers, last=counts.numel() - 1)
    # Received rows are sorted by rank, then by expert; experts need them sorted by expert, then by rank.
    local = theirs.shape[1] - 1
    expert = torch.arange(local, device=counts.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs[:, 1:].reshape(-1), output_size=sum(received))
    order = torch.sort(expert, stable=True).indices
    return Route(group, sent, received, order, inverse(order), theirs[:, 1:].sum(0))


def signature(x: torch.Tensor) -> int:
    """Return the width and the dtype of rows as one number."""
    return x.shape[1] * len(DTYPES) + DTYPES.index(x.dtype)


def _check_headers(headers: list[int], last: int) -> None:
    """Raise if a rank's input is invalid, or if rows differ."""
    if any(number < 0 for number in headers):
        mistakes = "; ".join(
            f"rank {rank}: {PROBLEMS[number].format(last=last)}" for rank, number in enumerate(headers) if number < 0
        )
        raise Fp8Error(
            f"dispatch_tokens got invalid input on a rank of the group, so no rank sends tokens: {mistakes}."
        )
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
    """Sends tokens to their experts as codes.

    The backward returns the gradients of rows in their own dtype, and sums them for each token.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, route: Route, cast: CastRecipe) -> torch.Tensor:
        """Return the received rows, `RowCodes` [rows, features] sorted by expert.

        Args:
            ctx: Autograd context.
            x: [tokens, features].
            order: int64 [tokens * k], flat indices of the (token, slot) pairs, sorted by expert.
            route: Numbers and order of rows.
            cast: Cast of each row. Each token is cast once, before it is copied for its experts.
        """
        ctx.route, ctx.tokens, ctx.slots = route, len(x), order.numel() // max(len(x), 1)
        ctx.save_for_backward(order)
        message = pack_rows(x, cast).index_select(0, order // max(ctx.slots, 1))
        return unpack_rows(route.exchange(message, forth=True), x.shape[1], cast, x.dtype, route.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the tokens, [tokens, features]."""
        (order,) = ctx.saved_tensors
        rows = ctx.route.exchange(grad.index_select(0, ctx.route.back), forth=False)
        # The sum has a fixed order; additions by index on GPUs do not.
        slots = rows.index_select(0, inverse(order)).view(ctx.tokens, ctx.slots, rows.shape[1])
        return slots.sum(1), None, None, None


class FromExperts(torch.autograd.Function):
    """Returns outputs of experts to the ranks of their tokens.

    The outputs are sent in their own dtype; the backward sends gradients as codes.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, route: Route, cast: CastRecipe) -> torch.Tensor:
        """Return the outputs [tokens * k, features], sorted by expert."""
        ctx.route, ctx.cast = route, cast
        return route.exchange(y.index_select(0, route.back), forth=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the outputs, `RowCodes` sorted by expert."""
        message = ctx.route.exchange(pack_rows(grad.contiguous(), ctx.cast), forth=True)
        return unpack_rows(message, grad.shape[1], ctx.cast, grad.dtype, ctx.route.order), None, None
