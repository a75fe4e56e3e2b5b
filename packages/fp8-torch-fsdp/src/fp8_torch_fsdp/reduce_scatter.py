"""`Float8ReduceScatter`: FSDP2's reduce-scatter of gradients as FP8 codes.

Sums are computed in float32 and in the order of ranks, so that a reduction gives the same bits in every run. Elements
in the dtype of the reduction are sent in the same message.
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
    """Rounding of gradients and position in the random bits.

    A `Stateful` for torch.distributed.checkpoint.

    The state is this rank's own, under a name that holds the rank.

    Args:
        config: How gradients are rounded.

    Attributes:
        config: As given.
        drawn: int64 scalar on the CPU: how many counters of random bits this rank has used.
    """

    def __init__(self, config: GradientCompression) -> None:
        self.config = config
        self.drawn = torch.zeros((), dtype=torch.int64)

    def draw(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return key and offset of a message's random bits.

        Messages are [rows, columns]; None rounds to nearest.

        Philox under the key (seed, rank): one bit pattern for each element, each counter good for four. Rows begin with
        a new block of counters.
        """
        if self.config.rounding != "stochastic":
            return None
        offset = int(self.drawn)
        self.drawn += -(-rows * -(-columns // BLOCK[1]) * BLOCK[1] // 4)
        # the seed below and the rank above, so that the errors of ranks are independent
        return self.config.seed | dist.get_rank() << 32, offset

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's random state."""
        return {self._name(): {"drawn": self.drawn}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict`.

        Raises:
            Fp8Error: It was saved with another number of ranks.
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
        state: The model's configuration and random bits.
        params: The group's parameters in the order of FSDP2.
        compressed: Whether each parameter's gradient is sent as FP8.
    """

    def __init__(self, state: RandomState, params: Sequence[Shard], compressed: Sequence[bool]) -> None:
        self._state = state
        self._params = list(zip(params, compressed, strict=True))

    @property
    def codes(self) -> dict[int, str]:
        """Dtype of codes of each compressed gradient, by shard id."""
        name = self._state.config.fp8_format.dtype_name
        return {
            id(param.local): name
            for param, is_compressed in self._params
            if is_compressed and param.parameter.requires_grad
        }

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer, which FSDP2 fills."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write this rank's reduced part into `output_tensor`.

        Ordered on the current stream.

        Args:
            output_tensor: [m], of the dtype of the input.
            input_tensor: [n * m]: for each of the n ranks its part of the gradients of the group's parameters.
            group: The ranks.
            op: SUM or AVG.
            async_op: Makes no difference: nothing is left to wait for.

        Raises:
            Fp8UnsupportedError: Another reduction.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Fp8UnsupportedError(
                "Compressed gradients are reduced by SUM or AVG; set_gradient_divide_factor is not supported. "
                "Call module.set_force_sum_reduction_for_comms(True) on each FSDP module, for a separate division."
            )
        rows = input_tensor.view(group.size(), -1)
        sizes, coded = self._parts(rows.shape[1])
        codes, wide = split(rows, sizes, coded)
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        sums = reduce_rows(self._state, codes, wide, group, divisor)
        output_tensor.copy_(join(*sums, sizes, coded).view_as(output_tensor))

    def _parts(self, length: int) -> tuple[list[int], list[bool]]:
        """Return sizes of parameters in a row of `length`, and FP8 flags."""
        trained = [(param, is_compressed) for param, is_compressed in self._params if param.parameter.requires_grad]
        sizes, coded = (
            [param.padded_shape.numel() for param, _ in trained],
            [is_compressed for _, is_compressed in trained],
        )
        # Parameters without a gradient are missing in the buffer, the same ones on all ranks; the arguments do not list
        # them.
        return (sizes, coded) if sum(sizes) == length else ([length], [False])


def reduce_rows(
    state: RandomState, compressed: Tensor, wide: Tensor, group: dist.ProcessGroup, divisor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the float32 sums over ranks of this rank's row.

    They are [c] and [w], divided by `divisor`.

    Args:
        state: Configuration and random bits.
        compressed: Values [n, c] for each of the n ranks of `group`, sent as codes.
        wide: Values [n, w] that are sent in their dtype.
        group: The ranks, which all call this with equal shapes.
        divisor: The sums are divided by it.
    """
    config = state.config
    random = state.draw(*compressed.shape)
    message = pack_gradients(compressed, wide, config.fp8_format, random)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    sizes = (compressed.shape[1], wide.shape[1])
    return sum_gradients(received, sizes, wide.dtype, config.fp8_format, divisor)


def split(rows: Tensor, sizes: Sequence[int], coded: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Split `rows` [n, c + w] into FP8 and other elements.

    They are [n, c] and [n, w].

    Args:
        rows: Values of adjacent parts.
        sizes: The number of elements of each part in a row.
        coded: Whether it is sent as FP8.
    """
    if all(coded) or not any(coded):  # without a copy if all of a group's parameters are sent the same way
        return (rows, rows[:, :0]) if all(coded) else (rows[:, :0], rows)
    parts = list(zip(rows.split(list(sizes), dim=1), coded, strict=True))
    codes = torch.cat([part for part, is_coded in parts if is_coded], dim=1)
    return codes, torch.cat([part for part, is_coded in parts if not is_coded], dim=1)


def join(codes: Tensor, wide: Tensor, sizes: Sequence[int], coded: Sequence[bool]) -> Tensor:
    """Undo `split` without the first dimension: [c], [w] to [c + w]."""
    if all(coded) or not any(coded):
        return codes if all(coded) else wide
    first = iter(codes.split([size for size, is_coded in zip(sizes, coded, strict=True) if is_coded]))
    second = iter(wide.split([size for size, is_coded in zip(sizes, coded, strict=True) if not is_coded]))
    return torch.cat([next(first if is_coded else second) for is_coded in coded])
