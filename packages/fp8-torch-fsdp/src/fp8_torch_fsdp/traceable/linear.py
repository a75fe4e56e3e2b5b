"""`TraceableShards`: strategy of a linear layer that gathers its weight.

The gather sends FP8 codes that each rank casts from its rows, or the rows in their stored dtype, which every rank casts
after the gather.

The backward starts the second gather, computes the weight's gradient, and starts to average that before it waits for
the gathered weight. Each collective can therefore overlap with a matmul.
"""

import dataclasses
from typing import Any

import torch

from fp8_common.torch import torch_dtype
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.fsdp import pad_rows, unpad
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import ParallelStrategy, with_bias
from fp8_torch_fsdp.scales.invalidate import nan_if_stale, poison_codes_if_stale
from fp8_torch_fsdp.scales.weight import Fp8Weight
from fp8_torch_fsdp.traceable.ops import copy_in_backward
from fp8_torch_fsdp.traceable.parameters import gathered
from fp8_torch_fsdp.traceable.placement import Placement, Started, local_of, pad


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceableShards(ParallelStrategy):
    """Strategy, and `Gather`, of a layer whose weight is sharded by rows.

    Attributes:
        weight: State of the weight, with the scales that the ranks share.
        place: Ranks that hold the shards.
        in_fp8: Whether the weight is gathered as FP8 codes.
    """

    weight: Fp8Weight
    place: Placement
    in_fp8: bool

    @property
    def gather(self) -> "TraceableShards":
        """Gather of the weight for each matmul: this object."""
        return self

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; its bias is gathered in high precision."""
        output = layer.fp8_matmul("weight", input, local_of(layer.weight))
        bias = None if layer.bias is None else gathered(layer.bias, self.place)
        return with_bias(output, bias)

    def send(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the inverse scales and this rank's contribution to the gather.

        Args:
            weight: Rows of this rank.

        Returns:
            float32 inverse scales, and padded codes; None and padded rows if the weight is not gathered in FP8.

        Raises:
            RuntimeError: If the weight has changed since its scale was computed. On a GPU, the inverse scales and the
                first row of codes are NaN instead.
        """
        state, grid = self.weight, self.weight.grid
        if not self.in_fp8:
            return None, pad(weight, state.padded_shape[0]).contiguous()
        # The scales are read in each call: in a compiled graph they are inputs, not constants.
        scale, scale_inv = state.scale, state.scale_inv
        if not state.local_bits.numel():  # a static scale, which does not depend on amax
            return scale_inv, pad_rows(grid.quantize_part(weight, scale, state.region), state.padded_shape)
        # If each rank's amax is the same as before, so is the scale; other changes of the weight need no new one. The
        # cast computes the amax in the same pass.
        codes, stale = grid.quantize_and_compare(weight, scale, state.local_bits, state.region)
        scale_inv = nan_if_stale(
            scale_inv,
            stale,
            # The message has no name, so that blocks of equal structure share one graph.
            f"The FP8 scale of a weight of shape {tuple(state.region.full_shape)} is stale: the weight changed since "
            "the last forward of the root. Call the module that fully_shard_traceable was applied to.",
        )
        poison_codes_if_stale(codes, stale, grid.cast.fp8_format)
        return scale_inv, pad_rows(codes, state.padded_shape)

    def start(self, sent: tuple[Any, ...], grad: torch.Tensor | None) -> tuple[torch.Tensor | None, Started]:
        """Start to gather the contributions of all ranks."""
        scale_inv, part = sent
        if grad is not None:
            # In the backward, the gather must depend on the gradient (see `ops`).
            part = copy_in_backward(part, grad)
        return scale_inv, self.place.start_gather(part)

    def finish(self, started: Any, record: bool) -> Quantized:
        """Return the gathered weight as an operand on the gather's buffer."""
        scale_inv, gather = started
        gathered_rows, shape = self.place.finish(gather), self.weight.region.full_shape
        fmt, tile = self.weight.grid.cast.fp8_format, self.weight.grid.tile
        if scale_inv is None:
            # The padding of all ranks is at the end.
            return self.weight.whole(gathered_rows[: shape[0]], record=record)
        return Quantized(unpad(gathered_rows, shape, torch_dtype(fmt)), scale_inv, fmt, tile)

    def start_reduce(self, grad_weight: torch.Tensor) -> Started:
        """Start to average the gradient over all ranks."""
        return self.place.start_average(grad_weight)

    def finish_reduce(self, started: Any) -> torch.Tensor:
        """Return this rank's rows of the averaged gradient."""
        return self.place.finish_average(started, self.weight.region.full_shape[0])
