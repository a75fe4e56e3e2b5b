"""`quantize_master_weights`: FP8 codes from flat slices of masters, as distributed optimizers of Megatron keep them."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fp8_common import Fp8Error
from fp8_common.torch.plugin import ShardGeometry, max_over_ranks
from fp8_te_init._weight import PrimaryFloat8Weight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Slice:
    """Consecutive elements of a flattened weight, and the rows that they touch.

    Attributes:
        weight: The whole weight.
        start: Index of the first element.
        values: [n], float.
    """

    weight: PrimaryFloat8Weight
    start: int
    values: torch.Tensor

    @property
    def geometry(self) -> ShardGeometry:
        # max: a weight without columns has no elements, and its only slice is empty.
        shape = self.weight.state.full_shape
        return ShardGeometry(full_shape=shape, first_index=self.start // max(1, shape[1]))

    def rows(self) -> torch.Tensor:
        """Return the touched rows; zeros, which no amax sees, stand where other ranks hold the elements."""
        columns = self.weight.shape[1]
        offset, count = self.start % max(1, columns), self.values.numel()
        rows = self.values.new_zeros(-(-(offset + count) // columns) if count else 0, columns)
        rows.view(-1)[offset : offset + count] = self.values.to(rows.device)
        return rows

    def keys(self) -> torch.Tensor:
        return self.weight.state.layout.keys(self.rows(), self.geometry)

    def store(self, keys: torch.Tensor, *, step: bool) -> None:
        state = self.weight.state
        # Also where this rank holds no element: its copy of the scale has to be that of the codes that others send.
        state.take_keys(keys, step=step)
        state.writes += 1
        increment_version(self.weight)
        if not self.values.numel():
            return
        # Whole rows are cast, because scales of rows and blocks lie on rows; of the result only this slice is stored.
        codes = state.layout.cast_part(self.rows(), state.scale, self.geometry).view(torch.uint8).view(-1)
        offset = self.start % self.weight.shape[1]
        own = slice(self.start, self.start + self.values.numel())
        state.codes.view(-1)[own] = codes[offset : offset + self.values.numel()]


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    *,
    step: bool = True,
) -> None:
    """Quantize flat slices of masters into whole FP8 weights, with scales of all slices: one MAX all-reduce.

    The codes of other ranks' slices are not touched: gather them afterwards, through
    `weight.codes.view(torch.uint8).view(-1)`. The scales are those of the whole weight on every rank.

    Args:
        model_weights: FP8 weights, the same in the same order on every rank.
        master_weights: For each the flat slice [n] that this rank holds, float; None where it holds nothing.
        start_offsets: For each slice, the index of its first element in the flattened weight.
        group: The ranks that hold the other slices; None if this process holds everything.
        step: Whether an optimizer step made the values; delayed scaling then records them.

    Raises:
        Fp8Error: Lists of different lengths, a weight that is not a whole FP8 weight, or a slice outside of it.
            All ranks raise, and no weight has changed.
    """
    weights = [_whole(weight) for weight in model_weights]  # the same on all ranks, so none is left waiting
    problem: Fp8Error | None = None
    try:
        parts = _slices_of(weights, master_weights, start_offsets)
    except Fp8Error as error:
        nothing = [None] * len(weights)
        problem, parts = error, _slices_of(weights, nothing, nothing)
    # The flag travels with the keys: a rank that raised before the all-reduce would leave the others in it.
    flag = torch.tensor([problem is not None], dtype=torch.int32, device=weights[0].device if weights else None)
    (*keys, failed), _ = max_over_ranks([*(part.keys() for part in parts), flag], group)
    if failed.item():
        raise problem or Fp8Error("Another rank gave quantize_master_weights wrong slices; its message says which.")
    for part, key in zip(parts, keys, strict=True):
        part.store(key, step=step)


def _slices_of(
    model_weights: Sequence[PrimaryFloat8Weight],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
) -> list[_Slice]:
    if not len(model_weights) == len(master_weights) == len(start_offsets):
        raise Fp8Error(
            f"quantize_master_weights got {len(model_weights)} weights, {len(master_weights)} masters and "
            f"{len(start_offsets)} offsets: give one of each for every weight, None where this rank holds nothing."
        )
    return [_slice_of(*one) for one in zip(model_weights, master_weights, start_offsets, strict=True)]


def _whole(weight: torch.Tensor) -> PrimaryFloat8Weight:
    if not (
        isinstance(weight, PrimaryFloat8Weight) and weight.is_whole and not weight.state.sharded and weight.ndim == 2
    ):
        raise Fp8Error(
            f"quantize_master_weights takes whole FP8 weights of this package, got {type(weight).__name__} of shape "
            f"{tuple(weight.shape)}. Weights under fully_shard belong to a MasterOptimizer."
        )
    return weight


def _slice_of(weight: PrimaryFloat8Weight, values: torch.Tensor | None, start: int | None) -> _Slice:
    values = torch.empty(0, device=weight.device) if values is None else values.detach().flatten()
    start = start or 0
    if start < 0 or start + values.numel() > weight.numel():
        raise Fp8Error(
            f"A slice of {values.numel()} elements from {start} does not lie in a weight of {weight.numel()} elements."
        )
    return _Slice(weight=weight, start=start, values=values)
