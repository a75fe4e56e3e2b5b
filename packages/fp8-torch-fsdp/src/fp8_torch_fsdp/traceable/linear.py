"""`TraceableShards`: an FP8 linear layer that gathers its rows per matmul.

The gather sends FP8 codes, cast on the rank that holds the rows, or the weight as stored, which every rank then casts.

The backward starts the second gather first, computes the weight's gradient meanwhile, and starts to average that
before it needs the gathered weight: each collective runs while a matmul is computed.
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
    """The weight of one layer, cut by rows; a `Gather` of it.

    Attributes:
        weight: Its shape, how it is scaled, and the scales that the ranks agreed on.
        place: Where the shards are.
        in_fp8: Whether it is gathered as FP8 codes.
    """

    weight: Fp8Weight
    place: Placement
    in_fp8: bool

    @property
    def gather(self) -> "TraceableShards":
        """The weight is gathered for each matmul."""
        return self

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Return the output; the bias is gathered in high precision."""
        output = layer.fp8_matmul("weight", input, local_of(layer.weight))
        bias = None if layer.bias is None else gathered(layer.bias, self.place)
        return with_bias(output, bias)

    def send(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return scales known on all ranks, or None, and local data.

        Raises:
            RuntimeError: The weight is not the one that its scale was made for; on a GPU its scale and the first row of
                codes are NaN then.
        """
        own, grid = self.weight, self.weight.grid
        if not self.in_fp8:
            return None, pad(weight, own.padded_shape[0]).contiguous()
        # The scales are read at each call: in a compiled graph it is an input, not a constant.
        scale, scale_inv = own.scale, own.scale_inv
        if not own.local_bits.numel():  # a constant: nothing to compare
            return scale_inv, pad_rows(grid.quantize_part(weight, scale, own.region), own.padded_shape)
        # The same amax on every rank is the same scale, so no change that matters escapes; the cast finds it in the
        # read that it needs anyway.
        codes, stale = grid.quantize_and_compare(weight, scale, own.local_bits, own.region)
        scale_inv = nan_if_stale(
            scale_inv,
            stale,
            # no name in here: blocks that differ in nothing but names share one graph
            f"The FP8 scale of a weight of shape {tuple(own.region.full_shape)} is stale: the weight changed since "
            "the last forward of the root. Call the module that fully_shard_traceable was applied to.",
        )
        poison_codes_if_stale(codes, stale, grid.cast.fp8_format)
        return scale_inv, pad_rows(codes, own.padded_shape)

    def start(self, sent: tuple[Any, ...], grad: torch.Tensor | None) -> tuple[torch.Tensor | None, Started]:
        """Start to gather the parts."""
        scale_inv, part = sent
        if grad is not None:
            # Only in the backward (see `ops`); in the forward there is no gradient to depend on.
            part = copy_in_backward(part, grad)
        return scale_inv, self.place.start_gather(part)

    def finish(self, started: Any, record: bool) -> Quantized:
        """Return the gathered weight as an operand; codes share memory."""
        scale_inv, gather = started
        arrived, shape = self.place.finish(gather), self.weight.region.full_shape
        fmt, tile = self.weight.grid.cast.fp8_format, self.weight.grid.tile
        if scale_inv is None:
            # padding of all ranks is at the end
            return self.weight.whole(arrived[: shape[0]], record=record)
        return Quantized(unpad(arrived, shape, torch_dtype(fmt)), scale_inv, fmt, tile)

    def start_reduce(self, grad_weight: torch.Tensor) -> Started:
        """Start to average the gradient over all ranks."""
        return self.place.start_average(grad_weight)

    def finish_reduce(self, started: Any) -> torch.Tensor:
        """Return this rank's rows of the averaged gradient."""
        return self.place.finish_average(started, self.weight.region.full_shape[0])
