"""`dispatch_tokens`: tokens travel to the ranks of their experts as FP8 codes with a scale for each, and come back.

Four transfers belong to a layer of experts: tokens there, results back, and the gradients of both. Each is one
all-to-all; codes and scales of a token are one row of bytes. A choice of casts says which of them are rounded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fp8_common import CastRecipe, Fp8Error, Fp8UnsupportedError
from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import dispatch

ROWWISE = CastRecipe(granularity="rowwise")
"""E4M3 codes and a scale for each token."""

_GRANULARITIES = {"rowwise": None, "blockwise_1x128": (1, 128)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenWire:
    """How what travels between tokens and their experts is cast: row-wise or in blocks of 1x128, or None, as it is.

    Attributes:
        tokens: Tokens on their way to the experts.
        results: What the experts made of them, on its way back.
        gradients: The gradients of both.
    """

    tokens: CastRecipe | None = ROWWISE
    results: CastRecipe | None = None
    gradients: CastRecipe | None = None

    def __post_init__(self) -> None:
        """Refuse scales that belong to more than a token."""
        for field in dataclasses.fields(self):
            cast = getattr(self, field.name)
            if cast is not None and (cast.scaling != "dynamic" or cast.granularity not in _GRANULARITIES):
                raise Fp8Error(
                    f"TokenWire.{field.name} cannot be cast with {cast.scaling} {cast.granularity} scaling: a scale "
                    "travels with its token. Use CastConfig with dynamic scaling and one of "
                    f"{', '.join(_GRANULARITIES)}, or None."
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """How many rows go from this rank to each, and from each to this rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    def back(self) -> "_Route":
        """Return the way back."""
        return _Route(sent=self.received, received=self.sent, group=self.group)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DispatchedTokens:
    """Tokens on the rank of their experts.

    Attributes:
        rows: [tokens, features], sorted by expert, and for one expert by the rank that they come from.
        offsets: int32 [local experts]: where the rows of each expert end.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    _order: torch.Tensor
    _route: _Route
    _wire: TokenWire

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Return the results of the tokens that this rank dispatched, in their order.

        Args:
            results: [tokens, features], one row for each of `rows`, in their dtype.

        Returns:
            [tokens of this rank, features].

        Raises:
            Fp8Error: `results` has another shape or dtype than `rows`; other ranks get NaN for what they wait for.
        """
        return torch.compiler.disable(self._combined)(results)

    def _combined(self, results: torch.Tensor) -> torch.Tensor:
        fits = results.shape == self.rows.shape and results.dtype == self.rows.dtype
        sent = results if fits else torch.full_like(self.rows, torch.nan)
        arrived = torch.empty_like(self._order)
        arrived[self._order] = torch.arange(len(self._order), device=arrived.device)
        combined = _Exchange.apply(
            sent.index_select(0, arrived), self._route.back(), self._wire.results, self._wire.gradients
        )
        if not fits:
            raise Fp8Error(
                f"combine needs the results of the dispatched tokens, {self.rows.dtype} {list(self.rows.shape)}, got "
                f"{results.dtype} {list(results.shape)}."
            )
        return combined


def dispatch_tokens(
    x: torch.Tensor, counts: torch.Tensor, *, group: dist.ProcessGroup | None = None, wire: TokenWire | None = None
) -> DispatchedTokens:
    """Send each token to the rank of its expert. Every rank of the group calls it; compiled code calls it uncompiled.

    What arrives are the values that codes and scales stand for, bit for bit those of a token that was cast and decoded
    before it travels in its dtype: a cast needs nothing from elsewhere.

    Args:
        x: [tokens, features], float32, bfloat16 or float16, sorted by expert.
        counts: Integers [ranks * local experts]: how many tokens each expert of all ranks gets from here. The first
            rank of the group has the first experts.
        group: The ranks that have different experts; the default group otherwise.
        wire: How tokens, results and gradients travel; FP8 tokens, all else in its dtype, otherwise.

    Raises:
        Fp8Error: Counts do not fit the tokens, or not the ranks, or ranks dispatch tokens of unlike features or dtypes:
            on all ranks alike, naming the rank.
        Fp8UnsupportedError: There is no process group.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise Fp8UnsupportedError("dispatch_tokens needs a process group: call torch.distributed.init_process_group.")
    # disabled when called: the decorator would import the compiler with the package
    return torch.compiler.disable(_dispatched)(x, counts, group, wire or TokenWire())


def _dispatched(x: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup, wire: TokenWire) -> DispatchedTokens:
    ranks = group.size()
    problem = _problem(_gathered(_header(x, counts), group), ranks)
    if problem is not None:
        raise Fp8Error(f"dispatch_tokens: {problem}")
    own = counts.detach().to(torch.int64).contiguous()
    arriving = torch.empty_like(own)
    dist.all_to_all_single(arriving, own, group=group)
    by_rank = arriving.view(ranks, -1)  # [from, expert]
    sent, received = torch.stack([own.view(ranks, -1).sum(1), by_rank.sum(1)]).tolist()
    route = _Route(sent=tuple(sent), received=tuple(received), group=group)
    experts = torch.arange(by_rank.shape[1], device=x.device).repeat(ranks)
    order = experts.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
    rows = _Exchange.apply(x, route, wire.tokens, wire.gradients)
    return DispatchedTokens(
        rows=rows.index_select(0, order),
        offsets=by_rank.sum(0).cumsum(0).int(),
        _order=order,
        _route=route,
        _wire=wire,
    )


class _Exchange(torch.autograd.Function):
    """Rows of all ranks to where they belong; their gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, route: _Route, cast: CastRecipe | None, of_gradient: CastRecipe | None
    ) -> torch.Tensor:
        ctx.route, ctx.cast = route, of_gradient
        return _sent(x, route, cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sent(grad, ctx.route.back(), ctx.cast), None, None, None


def _sent(x: torch.Tensor, route: _Route, cast: CastRecipe | None) -> torch.Tensor:
    """Return the rows that arrive here, in the dtype of `x` [tokens, features]."""
    if cast is None:
        return _exchanged(x.contiguous().view(torch.uint8), route).view(x.dtype)
    block, fmt = _GRANULARITIES[cast.granularity], cast.fp8_format
    if block is None:
        made = dispatch.cast_rowwise(x, fmt, cast.policy)
    else:
        made = dispatch.cast_blockwise(x.contiguous(), fmt, block, cast.policy)
    parts = made.codes.contiguous(), made.scale.contiguous()
    # bytes: gloo and older NCCL refuse float8, and a token's scales must not need a second transfer
    message = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    codes, scales = _exchanged(message, route).split([x.shape[1], made.scale.shape[1] * 4], dim=1)
    codes = codes.contiguous().view(torch_dtype(fmt))
    return dispatch.dequantize(codes, scales.contiguous().view(torch.float32), fmt, x.dtype, block)


def _exchanged(message: torch.Tensor, route: _Route) -> torch.Tensor:
    received = message.new_empty((sum(route.received), message.shape[1]))
    dist.all_to_all_single(received, message, list(route.received), list(route.sent), group=route.group)
    return received


def _header(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return what ranks tell each other before anything is sent, int64 [6]; see `_problem`."""
    is_matrix = x.ndim == 2 and x.dtype in _DTYPES
    of_x = (x.shape[0], x.shape[1], _DTYPES.index(x.dtype)) if is_matrix else (-1, -1, -1)
    made = torch.tensor([*of_x, -1, 0, 0], dtype=torch.int64, device=x.device)
    integers = not counts.is_floating_point() and not counts.is_complex() and counts.dtype != torch.bool
    if counts.ndim == 1 and len(counts) and integers:
        made[3] = len(counts)
        made[4], made[5] = counts.sum(), counts.min()
    return made


def _gathered(header: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    headers = [torch.empty_like(header) for _ in range(group.size())]
    dist.all_gather(headers, header, group=group)
    return torch.stack(headers).tolist()


def _problem(headers: Sequence[Sequence[int]], ranks: int) -> str | None:
    """Return what does not fit, the same sentence on every rank; None if all fits.

    Args:
        headers: Of each rank: rows, features, number of the dtype, length, sum and smallest of the counts.
        ranks: The number of ranks.
    """
    for rank, (rows, features, dtype, length, total, smallest) in enumerate(headers):
        who = f"rank {rank} of the group"
        if rows < 0:
            return f"{who} needs tokens [tokens, features] in float32, bfloat16 or float16."
        if length < 0:
            return f"{who} needs integer counts [experts], one for each expert of all ranks."
        if length % ranks or length != headers[0][3]:
            return (
                f"{who} has counts for {length} experts, rank 0 for {headers[0][3]}: give one for each expert of all "
                f"{ranks} ranks, which have equally many."
            )
        if smallest < 0 or total != rows:
            return f"{who} has {rows} tokens, and its counts are {total} with a smallest of {smallest}: make them fit."
        if (features, dtype) != tuple(headers[0][1:3]):
            own, first = f"{_DTYPES[dtype]} of {features}", f"{_DTYPES[headers[0][2]]} of {headers[0][1]}"
            return f"{who} sends {own} features, rank 0 {first}: tokens of all ranks must be alike."
    return None
