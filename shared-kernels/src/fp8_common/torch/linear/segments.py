"""`Groups`: where groups of rows lie; and operations on segments of rows that look at their values.

They are opaque to compilers, and none waits for a GPU. A segment is a run of consecutive rows, int32 [rows], never
falling. The kernels have not run on a GPU yet.
"""

import itertools

import torch

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch import _triton_groups as triton_groups
from fp8_common.torch._amax import amax_over, check_input_dtype, float_key, key_to_float, narrow_keys, of_narrow_keys
from fp8_common.torch._ops import NAMESPACE

BLOCK = 128
"""The rows that share scales in a matmul contracted over rows, with scales of blocks."""


class Groups:
    """Consecutive groups of rows, of which each group's end is given.

    Args:
        offsets: int32 or int64 [groups], on the device of the rows: the index behind each group's last row. They never
            fall; a group whose offset is that of the group before it is empty.
        rows: The number of rows, at least the last offset.

    Attributes:
        given: The offsets as they were given.
        offsets: The same, made to fit where the host cannot look at them: at others, kernels of torch end the process.
        count: The number of groups.
    """

    def __init__(self, offsets: torch.Tensor, rows: int) -> None:
        self.rows, self.count, self.given, self.offsets = rows, offsets.shape[0], offsets, offsets
        if self.count and not self.known_on_host:
            self.offsets = offsets.clamp(0, rows).cummax(0).values
        self._of_row: torch.Tensor | None = None
        self._block_of_row: torch.Tensor | None = None

    @property
    def known_on_host(self) -> bool:
        """Whether the host looks at what the offsets hold without waiting (`check_offsets`)."""
        return self.given.device.type == "cpu"

    # no `cached_property`: compilers do not follow its lock
    @property
    def of_row(self) -> torch.Tensor:
        """int32 [rows]: the group of each row, `count` for rows behind the last one."""
        if self._of_row is None:
            rows = torch.arange(self.rows, dtype=self.offsets.dtype, device=self.offsets.device)
            self._of_row = torch.searchsorted(self.offsets, rows, right=True, out_int32=True)
        return self._of_row

    @property
    def filled(self) -> torch.Tensor:
        """Bool [count]: whether a group has rows."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)) > 0

    def per_row(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return [rows, ...]: the entry of each row's group in [count, ...]; ones for rows of no group."""
        return torch.cat([of_groups, torch.ones_like(of_groups[:1])]).index_select(0, self.of_row)

    def blocks(self) -> tuple[torch.Tensor, int]:
        """Return the block of each row, int32 [rows], and how many there can be: a group may begin one more."""
        count = self.rows // BLOCK + self.count
        if self._block_of_row is not None:
            return self._block_of_row, count
        ends = torch.cat([self.offsets.new_zeros(1), self.offsets])
        blocks = (ends.diff() + BLOCK - 1) // BLOCK
        before = blocks.cumsum(0) - blocks
        group = self.of_row.clamp(max=self.count - 1)
        inside = torch.arange(self.rows, dtype=ends.dtype, device=ends.device) - ends[group]
        block = before[group] + inside // BLOCK
        self._block_of_row = torch.where(self.of_row < self.count, block, count).int()
        return self._block_of_row, count


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
    function = _amax_by_segment_op if torch.compiler.is_compiling() else _segment_amax
    return function(x, segments, count, per_column)


def segment_quantize(
    x: torch.Tensor, segments: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None
) -> torch.Tensor:
    """Return the codes [rows, columns] of x with the float32 scales of each row's segment; others have any codes.

    Args:
        x: float16, bfloat16 or float32 [rows, columns].
        segments: int32 [rows], as of `segment_amax`.
        scale: float32 [count], or [count, columns].
        fmt: Format of the codes.
        amax: Of the shape of `scale`; where it is known, it may save a pass.
    """
    if dispatch.launches(x, fmt):
        return triton_groups.group_cast(x, segments, scale, fmt)
    of_rows = torch.cat([scale, torch.ones_like(scale[:1])]).index_select(0, segments)
    return dispatch.quantize(x, of_rows if scale.ndim == 2 else of_rows[:, None], fmt, amax)


def zero_rows(y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return y [n, ...], a new tensor of nobody else, with zeros where bool `keep` [n] is False."""
    if dispatch.fused(y):
        _zero_rows_op(y, keep)
        return y
    if dispatch.launches(y) and y.is_contiguous():
        return triton_groups.clear_rows(y, keep)
    return torch.where(keep.view(-1, *(1 for _ in y.shape[1:])), y, 0)


def transposed_rows(codes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return [columns, p], contiguous, of codes [rows, columns] in the order of `source` [p]; 0 for negative ones."""
    if dispatch.launches(codes):
        return triton_groups.turn_rows(codes, source)
    # as bytes, because few operators know float8; the byte 0 is the value 0
    taken = (
        codes.view(torch.uint8)[source.clamp(min=0)]
        if len(codes)
        else codes.new_zeros((len(source), codes.shape[1]), dtype=torch.uint8)
    )
    return torch.where((source >= 0)[:, None], taken, 0).t().contiguous().view(codes.dtype)


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """Refuse offsets that fall, or lead past `rows`, where the host can look at them without waiting.

    Args:
        offsets: int32 or int64, at least one.
        rows: The number of rows.

    Raises:
        Fp8Error: They do, in eager mode.
    """
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return
    # numbers of Python: operators would take several times as long for so few
    ends = offsets.tolist()
    pairs = enumerate(itertools.pairwise([0, *ends]))
    if (wrong := next((i for i, (start, end) in pairs if not start <= end <= rows), None)) is None:
        return
    shown = ", ".join(map(str, ends[:8])) + ", ..." * (len(ends) > 8)
    raise Fp8Error(
        f"Group offsets must begin at 0 or above, never fall, and end at the number of rows, {rows}, or before; "
        f"got {shown}: {ends[wrong]} for expert {wrong} does not fit."
    )


def offsets_fit(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a bool scalar: offsets, at least one, begin at 0 or above, never fall and end at `rows` or before."""
    return (offsets.diff(prepend=offsets.new_zeros(1)) >= 0).all() & (offsets[-1] <= rows)


def _segment_amax(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    if triton_backend.applies(x):
        return triton_groups.group_amax(x, segments, count, columns=per_column)
    if per_column and x.device.type == "cpu":
        # one segment after the other: torch's reduction by index takes several times as long there
        ends = torch.searchsorted(segments, torch.arange(count + 1, dtype=segments.dtype)).tolist()
        keys = narrow_keys(x)
        found = keys.new_zeros((count, x.shape[1]))
        for segment, (start, end) in enumerate(itertools.pairwise(ends)):
            if start < end:
                torch.amax(keys[start:end], 0, out=found[segment])
        return of_narrow_keys(found, x.dtype)
    # Keys, as in every MAX of this package: integers keep NaN, and their maximum does not depend on an order.
    keys = float_key(check_input_dtype(x).float() if per_column else amax_over(x, (1,), keepdim=False))
    found = keys.new_zeros((count + 1, *keys.shape[1:]))
    # one more, for the rows that are in none
    places = segments.long()[:, None].expand_as(keys) if per_column else segments.long()
    found.scatter_reduce_(0, places, keys, "amax")
    return key_to_float(found[:count])


@torch.library.custom_op(f"{NAMESPACE}::zero_rows", mutates_args=("y",))
def _zero_rows_op(y: torch.Tensor, keep: torch.Tensor) -> None:
    """Write zeros to the entries of `y` [n, ...] whose bool in `keep` [n] is False: a few, where all else stays."""
    if triton_backend.applies(y) and y.is_contiguous():
        triton_groups.clear_rows(y, keep)
    else:
        y.masked_fill_(~keep.view(-1, *(1 for _ in y.shape[1:])), 0)


@torch.library.custom_op(f"{NAMESPACE}::amax_by_segment", mutates_args=())
def _amax_by_segment_op(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    """float32 [count], or [count, columns]."""
    return _segment_amax(x, segments, count, per_column).clone()


@_amax_by_segment_op.register_fake
def _(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    return x.new_empty((count, x.shape[1]) if per_column else (count,), dtype=torch.float32)
