"""`OwnCast`: rows of a sharded weight that are cast with scales of their own, before the ranks tell each other these.

Where FSDP2 cuts between the rows, or blocks, that have scales, each rank makes the scales of its rows in the cast that
makes the codes. What MAX then combines over ranks is the scales themselves: their bits, and 0 in the places of others.
"""

import dataclasses

import torch

from fp8_te_init._state import PrimaryState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnCast:
    """Codes that are not in their place yet.

    Attributes:
        state: The weight.
        codes: uint8 [n, columns] of the rows held here.
        keys: int32 [k], the bits of their scales in the places that these have in the whole weight, 0 elsewhere.
    """

    state: PrimaryState
    codes: torch.Tensor
    keys: torch.Tensor

    def store(self, keys: torch.Tensor) -> None:
        """Put the codes in their place, with the scales of all ranks: `keys` [k] that MAX has combined."""
        # A copy: `keys` may be a part of those of all weights.
        self.state.take_codes(self.codes, keys.view(torch.float32).view(self.state.scale.shape).clone())


def cast_own(state: PrimaryState, values: torch.Tensor, ranks: int) -> OwnCast | None:
    """Return the cast of the rows held here; None, and then on all ranks, where ranks share a scale.

    Args:
        state: The weight.
        values: [n, columns], float16, bfloat16 or float32.
        ranks: How many ranks hold the weight, each an equal part of its rows, the last ones less or nothing.
    """
    unit = _rows_of_a_scale(state, ranks)
    if unit is None:
        return None
    cast = state.layout.cast_whole(values)
    keys = torch.zeros(state.scale.shape, dtype=torch.int32, device=values.device)
    if state.rows:
        own = state.scale_of_all_rows(keys)
        own.narrow(0, state.first_row // unit, cast.scale.shape[0]).copy_(cast.scale.view(torch.int32))
    return OwnCast(state=state, codes=cast.codes.view(torch.uint8), keys=keys.view(-1))


def _rows_of_a_scale(state: PrimaryState, ranks: int) -> int | None:
    """Return how many rows have a scale, or a row of scales, where each of these is of one rank alone; else None."""
    scales, (rows, *others), part = state.scale.shape, state.full_shape, state.part
    if state.history is not None or not scales:
        return None
    if part is not None:
        # The parts of other ranks may be shorter: asked is what is the same for all of them.
        return 1 if state.layout.block is None and list(part.whole[1:]) == others else None
    unit = 1 if scales[0] == rows else 0 if state.layout.block is None else state.layout.block[0]
    held = -(-rows // ranks)
    return unit if unit and (held % unit == 0 or held >= rows) else None
