"""`CompressedReduceScatter`: the reduce-scatter that FSDP2 calls for the gradients of one of its groups."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_common import Fp8UnsupportedError
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._gradients.collectives import GradientExchange
from fp8_torch_fsdp._gradients.payload import Span, join, lengths, merged, split


class CompressedReduceScatter:
    """FSDP2's reduce-scatter as an all-to-all of FP8 codes and a float32 sum.

    Args:
        name: Name of the group's module, for its state.
        params: The group's parameters in the order of FSDP2.
        compressed: For each of them, whether its gradient travels as FP8.
        exchange: The model's reductions.

    Attributes:
        name: As given.
        residual: What roundings took from gradients, bfloat16 [ranks, compressed elements of a shard]; None without
            error feedback.
    """

    def __init__(
        self, name: str, params: Sequence[fsdp.ShardedParam], compressed: Sequence[bool], exchange: GradientExchange
    ) -> None:
        self.name = name
        self._params = list(zip(params, compressed, strict=True))
        self._exchange = exchange
        self.residual = self._new_residual() if exchange.config.error_feedback else None

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

    def _new_residual(self) -> Tensor:
        spans = [Span(_length(param), chosen) for param, chosen in self._params if param.is_trained]
        ranks = self._params[0][0].process_group.size()
        return torch.zeros((ranks, lengths(spans)[0]), dtype=torch.bfloat16, device=self._params[0][0].device)


def _length(param: fsdp.ShardedParam) -> int:
    return param.padded_shape.numel()
