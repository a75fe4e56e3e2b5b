"""`quantize_master_weights`: quantizes masters that ranks hold in flat slices into FP8 weights."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_common.torch_layers.sharding.scale_grid import Region
from fp8_te_init.weight.state import WeightState
from fp8_te_init.weight.tensor import PrimaryFloat8Weight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Slice:
    """Consecutive elements of a flattened master.

    Attributes:
        state: State of the whole weight.
        first: Index of the first element in the flattened weight.
        values: [n], float32, bfloat16 or float16.
    """

    state: WeightState
    first: int
    values: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """Rows [k, columns] that contain the elements.

        Elements of other ranks are zeros, which do not change an amax.
        """
        columns, count = self.state.full_shape[1], self.values.numel()
        if not count:
            return self.values.new_zeros(0, columns)
        inside = self.first % columns
        rows = self.values.new_zeros(-(-(inside + count) // columns), columns)
        rows.view(-1)[inside : inside + count] = self.values
        return rows

    @property
    def region(self) -> Region:
        """Region of `rows` in the weight."""
        shape = self.state.full_shape
        return Region.along(0, self.first // max(1, shape[1]), shape)

    def codes(self) -> torch.Tensor:
        """Return the codes of the elements, uint8 [n], at the current scales."""
        state = self.state
        codes = state.part.grid.quantize_part(self.rows, state.scale, self.region).view(torch.uint8).view(-1)
        inside = self.first % max(1, state.full_shape[1])
        return codes[inside : inside + self.values.numel()]


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Quantize flat slices of masters into whole FP8 weights, for distributed optimizers.

    Collective: call it on all ranks of the group. Codes and scales equal a cast of the whole master, also if slices end
    within a row or block. The arguments are the same as in TransformerEngine, whose function leaves the gather of codes
    to the caller; here all ranks hold all codes afterwards. Unrounded values are dropped. There are three collectives
    for any number of weights: the first validates the slices, the second reduces the scales, the third gathers codes.

    Args:
        model_weights: FP8 weights that are whole on each rank, in the same order on all ranks.
        master_weights: For each weight, this rank's elements [n] of the flattened master (float32, bfloat16 or
            float16), or None if this rank has none.
        start_offsets: For each weight, the index of the first of these elements in the flattened weight, or None. Each
            element of a weight must be in the slice of exactly one rank.
        group: Ranks that hold the slices; all by default, or this process if there is no process group.

    Raises:
        Fp8Error: If the lists have different lengths, a weight is not a whole FP8 weight, or slices overlap, leave gaps
            or do not fit. All ranks raise before anything is written.

    Examples:
        >>> import torch
        >>> from fp8_te_init import fp8_model_init, quantize_master_weights
        >>> with fp8_model_init(preserve_high_precision_init_val=True):
        ...     layer = torch.nn.Linear(64, 64)
        >>> master = layer.weight.get_high_precision_init_val().flatten().clone()  # one rank has all elements
        >>> master -= 0.01  # an optimizer step
        >>> quantize_master_weights([layer.weight], [master], [0])
        >>> (layer.weight.dequantize().flatten() - master).abs().max() < 0.01
        tensor(True)
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    problem, slices = None, list[_Slice]()
    try:
        slices = _slices_of(model_weights, master_weights, start_offsets)
    except Fp8Error as error:
        problem = error
    device = next((weight.device for weight in model_weights), torch.device("cpu"))
    bounds = [(piece.first, piece.values.numel()) for piece in slices] or [(0, 0)] * len(model_weights)
    table = _gathered(
        torch.tensor([(problem is not None, 0), *bounds], dtype=torch.int64, device=device), group
    ).tolist()
    _check_slices(problem, table, [tuple(weight.shape) for weight in model_weights])
    bits, _ = max_over_ranks([s.state.part.grid.amax_bits(s.rows, s.region) for s in slices], group)
    for piece, agreed in zip(slices, bits, strict=True):
        piece.state.set_scale(agreed, "step")
    # all ranks send equally many codes, as an all-gather requires
    longest = max(sum(count for _, count in of_rank[1:]) for of_rank in table)
    local_codes = torch.cat(
        [*(piece.codes() for piece in slices), torch.zeros(longest, dtype=torch.uint8, device=device)]
    )
    for (_, *places), codes in zip(table, _gathered(local_codes[:longest], group), strict=True):
        counts = [count for _, count in places]
        for piece, (first, count), part in zip(slices, places, codes[: sum(counts)].split(counts), strict=True):
            piece.state.codes.view(-1)[first : first + count] = part
    for weight, piece in zip(model_weights, slices, strict=True):
        # autograd then rejects the backward of a forward that used the previous weight
        increment_version(weight)
        piece.state.release()
        piece.state.mark_consistent()
        piece.state.follow_codes()


def _slices_of(
    weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor | None], offsets: Sequence[int | None]
) -> list[_Slice]:
    if not len(weights) == len(masters) == len(offsets):
        raise Fp8Error(
            f"quantize_master_weights got {len(weights)} weights, {len(masters)} masters and {len(offsets)} offsets: "
            "give one of each for every weight, None where this rank has nothing of it."
        )
    return [_slice_of(*arguments) for arguments in zip(weights, masters, offsets, strict=True)]


def _slice_of(weight: torch.Tensor, values: torch.Tensor | None, first: int | None) -> _Slice:
    if not (isinstance(weight, PrimaryFloat8Weight) and weight.is_whole and not weight.state.sharded):
        raise Fp8Error(
            f"quantize_master_weights takes whole FP8 weights of nn.Linear, got a {type(weight).__name__} of shape "
            f"{tuple(weight.shape)}. Weights under fully_shard are trained by a MasterOptimizer; "
            "TransformerEngine has its own quantize_master_weights for its weights; others need no cast."
        )
    values = torch.empty(0, device=weight.device) if values is None else values.detach()
    if not (values.is_floating_point() and values.itemsize in (2, 4)) or values.device != weight.device:
        raise Fp8Error(
            f"A slice of a master is float32, bfloat16 or float16 and on {weight.device} as its weight, got "
            f"{values.dtype} on {values.device}."
        )
    first = first or 0
    if first < 0 or first + values.numel() > weight.numel():
        raise Fp8Error(
            f"A slice of {values.numel()} elements from {first} does not lie in a weight of {weight.numel()} elements."
        )
    return _Slice(state=weight.state, first=first, values=values.flatten())


def _check_slices(problem: Fp8Error | None, table: list, shapes: list[tuple[int, ...]]) -> None:
    """Raise on all ranks for an error or inconsistent slices.

    Args:
        problem: Error of this rank.
        table: For each rank, (whether it has an error, 0), then (first element, count) for each weight.
        shapes: Shape of each weight.
    """
    if any(of_rank[0][0] for of_rank in table):
        raise problem or Fp8Error("Another rank gave quantize_master_weights wrong slices; see its message.")
    for index, shape in enumerate(shapes):
        end, size = 0, shape[0] * shape[1]
        for first, count in [*sorted(of_rank[index + 1] for of_rank in table if of_rank[index + 1][1]), (size, 0)]:
            if first != end:
                what = "are missing" if first > end else "came from two ranks"
                raise Fp8Error(
                    f"The slices of weight {index} {shape} do not fit together: the elements from {min(first, end)} to "
                    f"{max(first, end)} {what}. Each element of a weight belongs to one rank."
                )
            end = first + count


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensors of all ranks, stacked; they have equal shapes."""
    if group is None or group.size() == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(group.size() * tensor.numel())
    dist.all_gather_into_tensor(gathered, tensor.reshape(-1), group=group)
    return gathered.view(-1, *tensor.shape)
