"""`GradientCodes`: the average of one parameter's gradients, as FP8 codes, in operators that a graph holds.

The numbers are those of `fp8_torch_fsdp._gradients.collectives` for a message of this parameter alone. What roundings
keep from one reduction to the next are tensors here: a graph takes them as inputs and writes to them.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_common import GradientCompression
from fp8_common.torch.plugin import dispatch
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp._gradients.collectives import by_rank_of_node


class Sent(NamedTuple):
    """A message on its way: what arrives, what is sent (see `placement.Started`), and shape and dtype of the part."""

    result: Tensor
    sent: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """One collective of codes.

    Attributes:
        config: How gradients are rounded.
        size: Number of ranks.
        group: Name of their group.
        counter: int64 [3] on the CPU, for stochastic rounding: see `fp8_common.torch._gradients`.
        residual: bfloat16 [size, elements]: what earlier roundings took, with error feedback.
    """

    config: GradientCompression
    size: int
    group: str
    counter: Tensor | None = None
    residual: Tensor | None = None

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows [n, c] as uint8 codes and scales."""
        config = self.config
        none = rows[:, :0]
        return dispatch.pack_next_gradients(rows, none, config.fp8_format, config.block, self.residual, self.counter)

    def start(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Start to send row r of [size, c] to rank r; return what arrives and what is sent."""
        message = self.pack(rows)
        return compat.start_all_to_all(message, self.size, self.group), message

    def sum(self, arrived: Tensor, columns: int, divisor: int = 1) -> Tensor:
        """Wait for a message and return the float32 sum [columns] over ranks, divided."""
        config = self.config
        form = config.fp8_format, config.block
        return dispatch.sum_gradients(compat.wait(arrived), (columns, 0), torch.float32, *form, divisor)[0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientCodes:
    """How one parameter's gradient is averaged.

    Attributes:
        ranks: Number of shards.
        shards: Messages between the ranks that hold the other shards: one, or within a node and between nodes; ()
            leaves that average wide.
        copies: Messages between ranks that hold the same shard: the parts of the sum, and the sums; () leaves that
            average wide.
    """

    ranks: int
    shards: tuple[Message, ...]
    copies: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them, in order."""
        return *self.shards, *self.copies

    def start(self, padded: Tensor) -> Sent:
        """Start to average a gradient [ranks * rows, ...], of which each rank gets its rows."""
        rows = padded.view(self.ranks, -1)
        if len(self.shards) > 1:
            rows = by_rank_of_node(rows, self.shards[1].size)
        result, sent = self.shards[0].start(rows)
        return Sent(result, sent, (padded.shape[0] // self.ranks, *padded.shape[1:]), padded.dtype)

    def finish(self, started: Sent) -> Tensor:
        """Return this rank's rows [rows, ...] of the average."""
        columns, arrived = math.prod(started.shape), started.result
        for step, following in zip(self.shards, self.shards[1:], strict=False):
            rows = step.sum(arrived, columns * following.size).view(following.size, -1)
            arrived, _ = following.start(rows)
        return self.shards[-1].sum(arrived, columns, self.ranks).to(started.dtype).view(started.shape)

    def average_over_copies(self, part: Tensor) -> Tensor:
        """Return the average of `part` over the ranks that hold the same rows, the same bits on each of them."""
        adding, joining = self.copies
        flat = F.pad(part.reshape(-1), (0, -part.numel() % adding.size)).view(adding.size, -1)
        own = adding.sum(adding.start(flat)[0], flat.shape[1], adding.size)
        message = joining.pack(own[None])
        gathered = compat.wait(compat.start_all_gather(message, joining.size, joining.group))
        form = joining.config.fp8_format, joining.config.block
        values, _ = dispatch.unpack_gradients(gathered, (own.numel(), 0), torch.float32, *form)
        return values[: part.numel()].view(part.shape).to(part.dtype)
