"""The two reductions: reduce-scatter by an all-to-all of codes, and all-reduce, which gathers the sums as codes again.

Sums are made in float32 and in the order of ranks, so that a reduction gives the same bits on every run. Another number
of ranks sums, and for the all-reduce cuts blocks, in another way.

An all-to-all over several nodes sends every rank's whole gradient to the others. In two steps the ranks of a node add
theirs first, and what crosses nodes is one gradient for each node, rounded once more.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import GradientCompression
from fp8_common.torch.plugin import dispatch
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp._gradients.random_rounding import RandomBits
from fp8_torch_fsdp._nodes import node_groups

Parts = tuple[Tensor, Tensor]
"""Elements that travel as FP8, and elements that travel in their own dtype."""


class GradientExchange:
    """The reductions of one model's gradients on this rank.

    Args:
        config: How gradients are rounded.
        nodes: Nodes by ranks of a node, for reductions in two steps.

    Attributes:
        config: As given.
        bits: The random bits of stochastic rounding; None rounds to nearest.
    """

    def __init__(self, config: GradientCompression, nodes: DeviceMesh | None = None) -> None:
        self.config = config
        # (between nodes, within a node)
        self._groups = None if nodes is None else node_groups(nodes)
        self.bits = RandomBits(config.seed, dist.get_rank()) if config.rounding == "stochastic" else None

    def reduce_scatter(
        self, rows: Parts, group: dist.ProcessGroup, residual: Tensor | None = None, divisor: float = 1.0
    ) -> Parts:
        """Return the float32 sums [c] and [w] over ranks of this rank's row, divided by `divisor`.

        Args:
            rows: Values [n, c] and [n, w] for each of the n ranks of `group`.
            group: The ranks, which all call this with equal shapes.
            residual: What earlier roundings took, bfloat16 [n, c]; it is added, and overwritten with what this one
                takes.
            divisor: The sums are divided by it.
        """
        if self._groups is None:
            return self._reduce(rows, group, residual, divisor)
        between, within = self._groups
        wide = rows[1].dtype
        first = tuple(by_rank_of_node(part, between.size()) for part in rows)
        if residual is not None:
            residual = residual.view(first[0].shape)
        sums = self._reduce(first, within, residual)  # pyrefly: ignore[bad-argument-type]
        values, rest = (part.view(between.size(), -1) for part in sums)
        return self._reduce((values, rest.to(wide)), between, None, divisor)

    def _reduce(self, rows: Parts, group: dist.ProcessGroup, residual: Tensor | None, divisor: float = 1.0) -> Parts:
        values, wide = rows
        message = self._packed(values, wide, residual)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        sizes, config = (values.shape[1], wide.shape[1]), self.config
        return dispatch.sum_gradients(received, sizes, wide.dtype, config.fp8_format, config.block, divisor)

    def all_reduce(self, flat: Parts, group: dist.ProcessGroup, divisor: float = 1.0) -> Parts:
        """Return the sums over ranks of `flat`, [c] and [w], divided by `divisor`; the same bits on every rank.

        Each rank sums a part of the elements and sends it to all, rounded once more.
        """
        ranks = group.size()
        sizes = tuple(part.numel() for part in flat)
        compressed, wide = (F.pad(part, (0, -part.numel() % ranks)).view(ranks, -1) for part in flat)
        own, own_wide = (part[None] for part in self._reduce((compressed, wide), group, None, divisor))
        message = self._packed(own, own_wide.to(wide.dtype), None)
        gathered = message.new_empty((ranks, message.shape[1]))
        compat.all_gather_tensor(gathered, message, group=group)
        shape, config = (own.shape[1], own_wide.shape[1]), self.config
        parts = dispatch.unpack_gradients(gathered, shape, wide.dtype, config.fp8_format, config.block)
        return parts[0][: sizes[0]], parts[1][: sizes[1]]

    def _packed(self, values: Tensor, wide: Tensor, residual: Tensor | None) -> Tensor:
        config = self.config
        rows, columns = values.shape
        random = None if self.bits is None else self.bits.draw(rows, columns, config.block)
        return dispatch.pack_gradients(values, wide, config.fp8_format, config.block, residual, random)


def by_rank_of_node(rows: Tensor, nodes: int) -> Tensor:
    """Return rows [nodes * ranks, c] as [ranks, nodes * c]: what each rank of a node is to add, for all nodes."""
    ranks, columns = rows.shape[0] // nodes, rows.shape[1]
    return rows.view(nodes, ranks, columns).transpose(0, 1).reshape(ranks, nodes * columns)
