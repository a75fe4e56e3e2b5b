"""What is done to rows in groups and looks at their values: opaque to compilers, without a wait for a GPU."""

import itertools

import torch

from fp8_common._errors import Fp8Error
from fp8_common.torch._amax import amax_over, check_input_dtype, float_key, key_to_float
from fp8_common.torch._ops import NAMESPACE


def segment_amax(x: torch.Tensor, segments: torch.Tensor, count: int, *, per_column: bool) -> torch.Tensor:
    """Return max |x| over the rows of each segment, NaN wins; 0 for a segment without rows.

    Args:
        x: float16, bfloat16 or float32 [rows, columns].
        segments: int32 [rows], never falling: the segment of each row; rows with `count` are in none.
        count: Number of segments.
        per_column: For each column on its own.

    Returns:
        float32 [count], or [count, columns].
    """
    function = _segment_amax_op if torch.compiler.is_compiling() else _segment_amax
    return function(x, segments, count, per_column)


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """Refuse offsets that fall, or lead past `rows`, where the host can look at them without waiting.

    Raises:
        Fp8Error: They do, in eager mode on a CPU.
    """
    if torch.compiler.is_compiling() or offsets.device.type != "cpu" or offsets_fit(offsets, rows):
        return
    shown = ", ".join(map(str, offsets[:8].tolist())) + ", ..." * (len(offsets) > 8)
    raise Fp8Error(
        f"Group offsets must begin at 0 or above, never fall, and end at the number of rows, {rows}, or before; "
        f"got {shown}."
    )


def offsets_fit(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a bool scalar: offsets, at least one, begin at 0 or above, never fall and end at `rows` or before."""
    return (offsets.diff(prepend=offsets.new_zeros(1)) >= 0).all() & (offsets[-1] <= rows)


def _segment_amax(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    if per_column and x.device.type == "cpu":
        # one segment after the other: torch's reduction by index takes several times as long there
        ends = torch.searchsorted(segments, torch.arange(count + 1, dtype=segments.dtype)).tolist()
        parts = [amax_over(x[start:end], (0,), keepdim=False) for start, end in itertools.pairwise(ends)]
        return torch.stack(parts) if parts else x.new_zeros((0, x.shape[1]), dtype=torch.float32)
    # Keys, as in every MAX of this package: integers keep NaN, and their maximum does not depend on an order.
    keys = float_key(check_input_dtype(x).float() if per_column else amax_over(x, (1,), keepdim=False))
    found = keys.new_zeros((count + 1, *keys.shape[1:]))
    # one more, for the rows that are in none
    places = segments.long()[:, None].expand_as(keys) if per_column else segments.long()
    found.scatter_reduce_(0, places, keys, "amax")
    return key_to_float(found[:count])


@torch.library.custom_op(f"{NAMESPACE}::segment_amax", mutates_args=())
def _segment_amax_op(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    """float32 [count], or [count, columns]."""
    return _segment_amax(x, segments, count, per_column).clone()


@_segment_amax_op.register_fake
def _(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    return x.new_empty((count, x.shape[1]) if per_column else (count,), dtype=torch.float32)
