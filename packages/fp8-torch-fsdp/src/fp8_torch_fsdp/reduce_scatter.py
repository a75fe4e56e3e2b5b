"""`Float8ReduceScatter`: FSDP2's reduce-scatter with gradients as FP8 codes.

Sums are computed in float32 and in the order of ranks, so that a reduction gives the same bits in every run. Gradients
that are not compressed are sent in the dtype of the reduction, in the same message.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_common import Fp8Error, Fp8UnsupportedError, GradientCompression
from fp8_common.torch_layers.sharding.fsdp import Shard
from fp8_common.torch_layers.sharding.gradient_messages import BLOCK, pack_gradients, sum_gradients


class RandomState:
    """Rounding of gradients, and this rank's position in the random bits.

    A `Stateful` for torch.distributed.checkpoint. Each rank saves its own state, under a key with its rank.

    Args:
        config: Format and rounding of gradients.

    Attributes:
        config: Format and rounding of gradients.
        drawn: int64 scalar on the CPU: number of random counters that this rank has used.
    """

    def __init__(self, config: GradientCompression) -> None:
        self.config = config
        self.drawn = torch.zeros((), dtype=torch.int64)

    def draw(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return key and offset of the random bits of one message.

        The message is [rows, columns]. None if gradients are rounded to nearest. The generator is Philox with the key
        (seed, rank). Each element gets one bit pattern, and each counter gives four patterns. Columns are counted in
        whole blocks, so that each row begins with a new counter. The call advances `drawn`.
        """
        if self.config.rounding != "stochastic":
            return None
        offset = int(self.drawn)
        self.drawn += -(-rows * -(-columns // BLOCK[1]) * BLOCK[1] // 4)
        # the seed in the low bits and the rank in the high bits, so that errors of ranks are independent
        return self.config.seed | dist.get_rank() << 32, offset

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's random state."""
        return {self._name(): {"drawn": self.drawn}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict`.

        Raises:
            Fp8Error: If it has no state of this rank, for example because another number of ranks saved it.
        """
        saved = state_dict.get(self._name()) if isinstance(state_dict, dict) else None
        if not isinstance(saved, dict) or set(saved) != {"drawn"}:
            keys = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise Fp8Error(
                f"The state of compressed communication holds {keys}, and this rank needs {self._name()!r} with "
                "'drawn'. Load it on as many ranks as saved it, or begin without it."
            )
        self.drawn.copy_(saved["drawn"])

    def _name(self) -> str:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"


class Float8ReduceScatter:
    """Reduce-scatter of a parameter group: FP8 all-to-all and float32 sum.

    Args:
        state: Configuration and random bits, shared by all groups of a model.
        params: Parameters of the group, in FSDP2's order.
        compressed: Whether each parameter's gradient is sent in FP8.
    """

    def __init__(self, state: RandomState, params: Sequence[Shard], compressed: Sequence[bool]) -> None:
        self._state = state
        self._params = list(zip(params, compressed, strict=True))

    @property
    def codes(self) -> dict[int, str]:
        """FP8 dtype name of each compressed gradient, by id of its shard."""
        name = self._state.config.fp8_format.dtype_name
        return {
            id(param.local): name
            for param, is_compressed in self._params
            if is_compressed and param.parameter.requires_grad
        }

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer, which FSDP2 fills."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write this rank's reduced part into `output_tensor`.

        The result is ordered on the current stream.

        Args:
            output_tensor: [m], in the dtype of the input.
            input_tensor: [n * m]: for each of the n ranks, its part of the gradients of the group's parameters.
            group: Ranks that reduce.
            op: SUM or AVG.
            async_op: Ignored: FSDP2 has nothing to wait for.

        Raises:
            Fp8UnsupportedError: If `op` is another reduction.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Fp8UnsupportedError(
                "Compressed gradients are reduced by SUM or AVG; set_gradient_divide_factor is not supported. "
                "Call module.set_force_sum_reduction_for_comms(True) on each FSDP module, for a separate division."
            )
        rows = input_tensor.view(group.size(), -1)
        sizes, coded = self._parts(rows.shape[1])
        compressed, uncompressed = split(rows, sizes, coded)
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        sums = reduce_rows(self._state, compressed, uncompressed, group, divisor)
        output_tensor.copy_(join(*sums, sizes, coded).view_as(output_tensor))

    def _parts(self, length: int) -> tuple[list[int], list[bool]]:
        """Return the sizes of the gradients in a row, and compression flags.

        `length` is the number of elements of a row.
        """
        trained = [(param, is_compressed) for param, is_compressed in self._params if param.parameter.requires_grad]
        sizes, coded = (
            [param.padded_shape.numel() for param, _ in trained],
            [is_compressed for _, is_compressed in trained],
        )
        # Parameters without a gradient are missing in the buffer, on all ranks the same ones, and FSDP2 does not pass
        # which. Their group is then sent without compression.
        return (sizes, coded) if sum(sizes) == length else ([length], [False])


def reduce_rows(
    state: RandomState, compressed: Tensor, uncompressed: Tensor, group: dist.ProcessGroup, divisor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the sums over ranks of this rank's row.

    Collective: all ranks of `group` call it with equal shapes.

    Args:
        state: Configuration and random bits.
        compressed: [n, c]: one row for each of the n ranks of `group`, sent as codes.
        uncompressed: [n, u]: one row for each rank, sent in its dtype.
        group: Ranks that reduce.
        divisor: Divisor of the sums.

    Returns:
        float32 [c] and [u], the sums divided by `divisor`.
    """
    config = state.config
    random = state.draw(*compressed.shape)
    message = pack_gradients(compressed, uncompressed, config.fp8_format, random)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    sizes = (compressed.shape[1], uncompressed.shape[1])
    return sum_gradients(received, sizes, uncompressed.dtype, config.fp8_format, divisor)


def split(rows: Tensor, sizes: Sequence[int], coded: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Split rows into elements sent in FP8 and other elements.

    Args:
        rows: [n, c + u], rows of adjacent parts.
        sizes: Number of elements of each part in a row.
        coded: Whether each part is sent in FP8.

    Returns:
        [n, c] and [n, u].
    """
    if all(coded) or not any(coded):  # no copy if all parts are sent in the same form
        return (rows, rows[:, :0]) if all(coded) else (rows[:, :0], rows)
    parts = list(zip(rows.split(list(sizes), dim=1), coded, strict=True))
    compressed = torch.cat([part for part, is_coded in parts if is_coded], dim=1)
    return compressed, torch.cat([part for part, is_coded in parts if not is_coded], dim=1)


def join(compressed: Tensor, uncompressed: Tensor, sizes: Sequence[int], coded: Sequence[bool]) -> Tensor:
    """Undo `split` for one row: [c] and [u] to [c + u]."""
    if all(coded) or not any(coded):
        return compressed if all(coded) else uncompressed
    first = iter(compressed.split([size for size, is_coded in zip(sizes, coded, strict=True) if is_coded]))
    second = iter(uncompressed.split([size for size, is_coded in zip(sizes, coded, strict=True) if not is_coded]))
    return torch.cat([next(first if is_coded else second) for is_coded in coded])
