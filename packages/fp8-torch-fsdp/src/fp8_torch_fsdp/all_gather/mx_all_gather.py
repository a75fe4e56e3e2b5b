"""`Float8AllGather`: FSDP2's communication object that sends matrices as MX codes.

`FSDPModule.set_custom_all_gather` installs it for layers of other kinds; their parameters stay plain tensors.

A matrix is sent as E4M3 codes with one E8M0 byte per 32 consecutive values of a row, where a row contains all
dimensions after the first. It is decoded to the dtype that FSDP2 gathers. Each rank computes scales from its shard and
sends them with the codes, so the ranks need no shared scales, and writes to weights need not be tracked.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_common import E4M3, Fp8Error
from fp8_common.torch.casts import MX_BLOCK, quantize_mx
from fp8_common.torch.decoding import dequantize_mx
from fp8_common.torch_layers.sharding.fsdp import Shard
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight

MODE = "rceil"
"""Rounding mode of the scales: up, so that no value saturates."""
_FIRST_NORMAL = 1 << E4M3.mantissa_bits
"""Smallest code of a positive normal number."""


class Float8AllGather:
    """All-gather of an FSDP2 parameter group that sends matrices as MX codes.

    Args:
        before: All-gather that the group used before, which sends the bytes.
        params: Parameters of the group, in FSDP2's order.
        compressed: Whether each parameter is sent as codes.

    Attributes:
        before: All-gather that the group used before.
        matrices: Parameters that are sent as codes.
    """

    def __init__(self, before: Any, params: Sequence[Shard], compressed: Sequence[bool]) -> None:
        self.before, self._params = before, list(zip(params, compressed, strict=True))
        self.matrices = [param for param, is_compressed in self._params if is_compressed]

    @property
    def codes(self) -> dict[int, int]:
        """Bytes of one gather of each compressed parameter, by shard id."""
        return {id(param.local): coded_bytes(param.parameter.shape) for param in self.matrices}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer, which FSDP2 fills."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with the parameters of all ranks.

        The result is identical on all ranks, and ordered on the current stream.

        Args:
            output_tensor: [n * m], in the dtype of the input.
            input_tensor: [m]: this rank's padded shards in the dtype that FSDP2 gathers; uint8 if dtypes differ, as in
                groups with FP8 layers.
            group: The n ranks.
            async_op: Passed to the previous all-gather, which is completed before this call returns.

        Raises:
            Fp8Error: If the size of the buffer does not match the parameters of the group.
        """
        local_bytes, ranks = input_tensor.view(torch.uint8), group.size()
        parts = [_Part.of(param, is_compressed) for param, is_compressed in self._params]
        sizes = [part.nbytes for part in parts]
        if sum(sizes) != local_bytes.numel():
            named = ", ".join(f"{param.full_name} {tuple(param.padded_shape)}" for param, _ in self._params)
            raise Fp8Error(
                f"FSDP2 gathers {local_bytes.numel()} bytes per rank, expected {sum(sizes)} for {named}. "
                "Call remove() before parameters change, and compress_communication afterwards."
            )
        message = torch.cat([part.pack(data) for part, data in zip(parts, local_bytes.split(sizes), strict=True)])
        received = self.before.allocate((ranks * message.numel(),), dtype=torch.uint8, device=message.device)
        work = self.before(output_tensor=received, input_tensor=message, group=group, async_op=async_op)
        if isinstance(work, dist.Work):
            work.wait()
        messages = received.view(ranks, -1).split([part.sent for part in parts], dim=1)
        targets = output_tensor.view(torch.uint8).view(ranks, -1).split(sizes, dim=1)
        for part, data, target in zip(parts, messages, targets, strict=True):
            target.copy_(part.unpack(data))


def coded_bytes(shape: torch.Size) -> int:
    """Return the bytes of the codes and scales of a matrix."""
    columns = math.prod(shape[1:])
    return shape[0] * (columns + -(-columns // MX_BLOCK[1]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One parameter's part of a rank's message.

    Attributes:
        dtype: dtype of the values in FSDP2's buffer.
        nbytes: Bytes of the values in FSDP2's buffer.
        sent: Bytes that are sent.
        columns: Length of a row of a matrix sent as codes; 0 for data that is sent unchanged.
    """

    dtype: torch.dtype
    nbytes: int
    sent: int
    columns: int

    @classmethod
    def of(cls, param: Shard, is_compressed: bool) -> "_Part":
        rows, columns = param.padded_shape[0], math.prod(param.padded_shape[1:])
        local, size = param.local, rows * columns
        dtype = torch.uint8 if isinstance(local, ShardedFloat8Weight) else param.wire_dtype
        is_mx = dtype == torch.uint8 and local.fp8_weight.grid.is_mx
        nbytes = coded_bytes(param.padded_shape) if is_mx else size * dtype.itemsize
        if not is_compressed:
            return cls(dtype, nbytes, nbytes, 0)
        return cls(dtype, nbytes, coded_bytes(param.padded_shape), columns)

    def pack(self, data: Tensor) -> Tensor:
        """Convert data in FSDP2's buffer, uint8 [nbytes], to the message, uint8 [sent]."""
        if not self.columns:
            return data
        # The bytes of other parameters can misalign the data for its dtype.
        data = data if data.storage_offset() % self.dtype.itemsize == 0 else data.clone()
        cast = quantize_mx(data.view(self.dtype).view(-1, self.columns), E4M3, MODE)
        return torch.cat([part.view(torch.uint8).view(-1) for part in cast])

    def unpack(self, messages: Tensor) -> Tensor:
        """Convert messages, uint8 [ranks, sent], to data, uint8 [ranks, nbytes]."""
        if not self.columns:
            return messages
        size, ranks = self.nbytes // self.dtype.itemsize, len(messages)
        codes = messages[:, :size].reshape(-1, self.columns)
        scales = messages[:, size:].reshape(len(codes), -1)
        return dequantize_mx(codes, scales, E4M3, self.dtype).view(ranks, -1).view(torch.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixGatherStats:
    """Rounding error and bytes of the gather of one matrix.

    Attributes:
        name: Name of the matrix in the model.
        shape: Shape of the whole matrix.
        bytes: Bytes of one gather, of all ranks together, with padding.
        below_normal: Share of the non-zero values with codes below E4M3's normal range, which have fewer than three
            mantissa bits.
        error: Norm of the rounding error divided by the norm of the matrix.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    below_normal: float
    error: float

    @classmethod
    def of(cls, name: str, param: Shard) -> "MatrixGatherStats":
        """Compute the statistics of the current values.

        Collective: all ranks of the mesh call it. It runs one all-reduce of four numbers.
        """
        values = param.local.detach().to(param.device, param.wire_dtype).flatten(1)
        numbers = torch.zeros(4, dtype=torch.float64, device=param.device)
        if values.numel():
            codes, scales = quantize_mx(values, E4M3, MODE)
            low = ((codes.view(torch.uint8) & 127) < _FIRST_NORMAL) & (values != 0)
            change = dequantize_mx(codes, scales, E4M3, torch.float32) - values
            sums = low.sum(), (values != 0).sum(), change.double().square().sum(), values.double().square().sum()
            numbers.copy_(torch.stack([number.double() for number in sums]))
        dist.all_reduce(numbers, group=param.group())
        low, count, change, size = numbers.tolist()
        return cls(
            name=name,
            shape=tuple(param.parameter.shape),
            bytes=coded_bytes(param.padded_shape) * param.process_group.size(),
            below_normal=low / max(count, 1),
            error=(change / size) ** 0.5 if size else 0.0,
        )
