"""The reduce-scatter and the all-reduce hook that FSDP2 calls for the gradients of one of its groups."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_common import Fp8UnsupportedError
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._gradients.collectives import GradientExchange
from fp8_torch_fsdp._gradients.payload import Span, join, merged, split


class CompressedReduceScatter:
    """FSDP2's reduce-scatter as an all-to-all of FP8 codes and a float32 sum.

    Args:
        name: Name of the group's module, for its state.
        params: The group's parameters in the order of FSDP2.
        compressed: For each of them, whether its gradient travels as FP8.
        exchange: The model's reductions.

    Attributes:
        name: As given.
    """

    def __init__(
        self, name: str, params: Sequence[fsdp.ShardedParam], compressed: Sequence[bool], exchange: GradientExchange
    ) -> None:
        self.name = name
        self._params = list(zip(params, compressed, strict=True))
        self._exchange = exchange
        self._residual: Tensor | None = None
        # the parameters that it is of, by their places in the group
        self._fed_back: dict[int, int] = {}

    @property
    def residual(self) -> Tensor | None:
        """What roundings took, bfloat16 [ranks, compressed elements of a shard]; None without error feedback.

        It is of the parameters that are trained now: one that is frozen loses its part, one that is trained anew begins
        with zeros.
        """
        if not self._exchange.config.error_feedback:
            return None
        trained = {i: _length(p) for i, (p, chosen) in enumerate(self._params) if chosen and p.is_trained}
        if self._residual is None or trained != self._fed_back:
            old, ranks = self._parts_of_residual(), self._params[0][0].process_group.size()
            fresh = {"dtype": torch.bfloat16, "device": self._params[0][0].device}
            parts = [old[i] if i in old else torch.zeros((ranks, n), **fresh) for i, n in trained.items()]
            self._residual, self._fed_back = torch.cat([torch.zeros((ranks, 0), **fresh), *parts], dim=1), trained
        return self._residual

    def _parts_of_residual(self) -> dict[int, Tensor]:
        if self._residual is None:
            return {}
        parts = self._residual.split(list(self._fed_back.values()), dim=1)
        return dict(zip(self._fed_back, parts, strict=True))

    def travels(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield the shard of each parameter, and whether its gradient travels as FP8."""
        for param, chosen in self._params:
            yield param.local, chosen

    @property
    def codes_dtype(self) -> str:
        """The name of the dtype of codes."""
        return self._exchange.config.fp8_format.dtype_name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write the reduction of this rank's part into `output_tensor`, ordered on the current stream.

        Args:
            output_tensor: [m], of the dtype of the input.
            input_tensor: [n * m]: for each of the n ranks its part of the gradients of the group's parameters.
            group: The ranks.
            op: SUM or AVG.
            async_op: Makes no difference: nothing is left to wait for.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Fp8UnsupportedError(
                "Compressed gradients are reduced by SUM or AVG, and not by what set_gradient_divide_factor asks. "
                "Call module.set_force_sum_reduction_for_comms(True) on each FSDP module: it then divides by itself."
            )
        rows = input_tensor.view(group.size(), -1)
        spans = self.spans(rows.shape[1])
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        sums = self._exchange.reduce_scatter(split(rows, spans), group, self._residual_of(spans), divisor)
        total = join(*sums, spans)
        output_tensor.copy_(total.view_as(output_tensor))

    def spans(self, length: int) -> tuple[Span, ...]:
        """Return how the elements of a rank's part, `length` of them, travel."""
        spans = merged([Span(_length(param), chosen) for param, chosen in self._params if param.is_trained])
        # Parameters without a gradient are left out of the buffer, the same ones on all ranks; which, it does not say.
        return spans if sum(span.length for span in spans) == length else (Span(length, compressed=False),)

    def _residual_of(self, spans: Sequence[Span]) -> Tensor | None:
        return self.residual if any(span.compressed for span in spans) else None


class ReplicaAverage:
    """FSDP2's all-reduce hook: the average over ranks that hold copies of the same shards.

    Args:
        exchange: The model's reductions.
        scatter: The group's reduce-scatter, which knows what travels as codes.
        replicas: The ranks.
    """

    def __init__(
        self, exchange: GradientExchange, scatter: CompressedReduceScatter, replicas: dist.ProcessGroup
    ) -> None:
        self._exchange, self._scatter, self._replicas = exchange, scatter, replicas

    def __call__(self, reduced: Tensor) -> None:
        """Average this rank's part of the gradients, [m], in place."""
        if self._replicas.size() > 1:
            average_flat(self._exchange, reduced, self._scatter.spans(reduced.numel()), self._replicas)


def average_flat(exchange: GradientExchange, flat: Tensor, spans: Sequence[Span], group: dist.ProcessGroup) -> None:
    """Replace `flat` by its average over the ranks of `group`, which all call this with equal spans."""
    compressed, wide = (part[0] for part in split(flat[None], spans))
    flat.copy_(join(*exchange.all_reduce((compressed, wide), group, group.size()), spans))


def _length(param: fsdp.ShardedParam) -> int:
    return param.padded_shape.numel()
