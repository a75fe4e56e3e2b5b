"""`GroupOffsets`: layout of row groups; and operations on segments of rows.

Compilers see them as operators, and none waits for a GPU. A segment is a run of consecutive rows. Segments are given as
int32 [rows], the segment of each row, which never falls.
"""

import itertools

import torch

from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.hardware import ALIGNMENT
from fp8_common.policy import ScalePolicy
from fp8_common.torch import casts
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import launch, launches, name_of, plans, takes
from fp8_common.torch.numerics import (
    amax_bits,
    amax_over,
    check_input_dtype,
    narrow_bits,
    torch_dtype,
)

BLOCK = 128
"""The rows that share scales in a matmul contracted over rows, with scales of blocks."""
LONGEST_ROW = 8192
"""Columns up to which one launch casts rows and columns."""


class GroupOffsets:
    """Consecutive groups of rows, of which each group's end is given.

    Args:
        offsets: int32 or int64 [groups], on the device of the rows: the index after each group's last row. They never
            fall; a group is empty if its offset equals the previous one's.
        rows: The number of rows, at least the last offset.

    Attributes:
        given: The offsets in their original form.
        offsets: The same, made to fit where the host cannot look at them: at others, kernels of torch end the process.
        count: The number of groups.
    """

    def __init__(self, offsets: torch.Tensor, rows: int) -> None:
        self.rows, self.count, self.given, self.offsets = rows, offsets.shape[0], offsets, offsets
        if self.count and not self.known_on_host:
            self.offsets = offsets.clamp(0, rows).cummax(0).values
        self._of_row: torch.Tensor | None = None
        self._block_of_row: torch.Tensor | None = None
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None
        self._of_place: torch.Tensor | None = None
        self._source: torch.Tensor | None = None

    @property
    def known_on_host(self) -> bool:
        """True if the host reads the offsets without waiting (`check_offsets`)."""
        return self.given.device.type == "cpu"

    # no `cached_property`: compilers do not follow its lock
    @property
    def of_row(self) -> torch.Tensor:
        """int32 [rows]: each row's group, `count` after the last."""
        if self._of_row is None:
            rows = torch.arange(self.rows, dtype=self.offsets.dtype, device=self.offsets.device)
            self._of_row = torch.searchsorted(self.offsets, rows, right=True, out_int32=True)
        return self._of_row

    @property
    def filled(self) -> torch.Tensor:
        """Bool [count]: whether a group has rows."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)) > 0

    def per_row(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return each row's entry of [count, ...], as [rows, ...].

        Rows of no group get ones.
        """
        return torch.cat([of_groups, torch.ones_like(of_groups[:1])]).index_select(0, self.of_row)

    @property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [count] starts and ends of groups, padded to 16 rows."""
        if self._padded is None:
            sizes = (self.offsets.diff(prepend=self.offsets.new_zeros(1)) + (ALIGNMENT - 1)) & -ALIGNMENT
            ends = sizes.cumsum(0, dtype=torch.int32)
            self._padded = (ends - sizes).int(), ends
        return self._padded

    @property
    def padded_rows(self) -> int:
        """Number of padded rows that suffices for any offsets.

        Only the device knows the exact number.
        """
        return -(-(self.rows + self.count * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT

    @property
    def of_place(self) -> torch.Tensor:
        """int32 [padded_rows]: each place's group, `count` after the last."""
        if self._of_place is None:
            places = torch.arange(self.padded_rows, dtype=torch.int32, device=self.offsets.device)
            self._of_place = torch.searchsorted(self.padded[1], places, right=True, out_int32=True)
        return self._of_place

    @property
    def source(self) -> torch.Tensor:
        """int32 [padded_rows]: the row at each padded place, or -1."""
        if self._source is None:
            group = self.of_place.clamp(max=self.count - 1)
            places = torch.arange(self.padded_rows, dtype=torch.int32, device=group.device)
            inside = places - self.padded[0][group]
            before = torch.cat([self.offsets.new_zeros(1), self.offsets])
            self._source = torch.where(inside < before.diff()[group], before[group] + inside, -1).int()
        return self._source

    def places(self) -> torch.Tensor:
        """Return int32 [rows]: each row's place in the padded groups.

        Rows of no group have arbitrary places.
        """
        starts = self.padded[0] - torch.cat([self.offsets.new_zeros(1), self.offsets[:-1]])
        rows = torch.arange(self.rows, dtype=torch.int32, device=starts.device)
        return rows + starts[self.of_row.clamp(max=self.count - 1)].int()

    def blocks(self) -> tuple[torch.Tensor, int]:
        """Return each row's block of `BLOCK` rows, and their maximum number.

        The blocks are int32 [rows]. Each group begins with a new block, so that its last one may be partial; rows of no
        group have the maximum number.
        """
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


def _amax_by_kernel(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    plan = plans().group_amax(*x.shape, count, name_of(x.dtype), columns=per_column)
    return launch(plan, x.device, x_ptr=x.contiguous(), group_ptr=segments)[0].view(torch.float32)


@operator(
    lambda x, segments, count, per_column: x.new_empty(
        (count, x.shape[1]) if per_column else (count,), dtype=torch.float32
    ),
    _amax_by_kernel,
)
def segment_amax(x: torch.Tensor, segments: torch.Tensor, count: int, per_column: bool) -> torch.Tensor:
    """Return max |x| over each segment's rows.

    The result is NaN if an element of the segment is NaN, and 0 for a segment without rows.

    Args:
        x: float16, bfloat16 or float32 [rows, columns].
        segments: int32 [rows], never falling: the segment of each row; `count` for rows of no segment.
        count: Number of segments.
        per_column: Whether each column has a separate maximum.

    Returns:
        float32 [count], or [count, columns].
    """
    if per_column and x.device.type == "cpu":
        # one segment after the other: torch's reduction by index takes several times as long there
        ends = torch.searchsorted(segments, torch.arange(count + 1, dtype=segments.dtype)).tolist()
        narrow = narrow_bits(x)
        maxima = narrow.new_zeros((count, x.shape[1]))
        for segment, (start, end) in enumerate(itertools.pairwise(ends)):
            if start < end:
                torch.amax(narrow[start:end], 0, out=maxima[segment])
        return maxima.view(x.dtype).float()
    # Bits, as in every MAX of this package: integers keep NaN, and their maximum does not depend on an order.
    bits = amax_bits(check_input_dtype(x).float() if per_column else amax_over(x, (1,), keepdim=False))
    # one more, for the rows that are in none
    maxima = bits.new_zeros((count + 1, *bits.shape[1:]))
    places = segments.long()[:, None].expand_as(bits) if per_column else segments.long()
    maxima.scatter_reduce_(0, places, bits, "amax")
    return maxima[:count].view(torch.float32)


def casts_columns(x: torch.Tensor, fmt: Format, policy: ScalePolicy, *, rows: bool = False) -> bool:
    """Return whether one launch casts columns of groups.

    Args:
        x: [rows, columns].
        fmt: The format.
        policy: The rule for the scales.
        rows: Whether the rows must be cast too.
    """
    fits = x.is_contiguous() and x.numel() > 0 and policy.formula != "e8m0"
    return fits and (not rows or x.shape[1] <= LONGEST_ROW) and launches(x, fmt, policy)


def _columns_by_kernel(
    x: torch.Tensor, ends: torch.Tensor, padded_ends: torch.Tensor, rows: int, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, ...]:
    plan = plans().group_columns(*x.shape, rows, len(ends), name_of(x.dtype), fmt, policy)
    return launch(plan, x.device, x_ptr=x, end_ptr=ends, padded_end_ptr=padded_ends)


@operator(
    lambda x, ends, padded_ends, rows, fmt, policy: (
        x.new_empty((x.shape[1], rows), dtype=torch_dtype(fmt)),
        x.new_empty((len(ends), x.shape[1]), dtype=torch.float32),
    ),
    _columns_by_kernel,
)
def group_columns(
    x: torch.Tensor, ends: torch.Tensor, padded_ends: torch.Tensor, rows: int, fmt: Format, policy: ScalePolicy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of each group's columns and their scales back.

    The codes of a column are contiguous.

    Args:
        x: float16, bfloat16 or float32 [rows of x, columns], contiguous.
        ends: int32 [groups], where each group ends in x.
        padded_ends: int32 [groups], where each group ends in the codes; see `GroupOffsets.padded`.
        rows: `GroupOffsets.padded_rows`.
        fmt: The format.
        policy: The rule for the scales.

    Returns:
        float8 [columns, rows], with zeros after the codes of each group and arbitrary values after the last group;
        float32 [groups, columns].
    """
    groups = GroupOffsets(ends, x.shape[0])
    scale = casts.scale_from_amax(segment_amax(x, groups.of_row, groups.count, True), fmt, policy)
    codes = segment_quantize(x, groups.of_row, scale, fmt, None)
    return transposed_rows(codes, groups.source), casts.reciprocal(scale)


def _both_by_kernel(
    x: torch.Tensor,
    fold: torch.Tensor | None,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    rows: int,
    fmt: Format,
    policy: ScalePolicy,
) -> tuple[torch.Tensor, ...]:
    shape = *x.shape, rows, len(ends)
    plan = plans().group_columns(*shape, name_of(x.dtype), fmt, policy, rows=True, fold=fold is not None)
    return launch(plan, x.device, x_ptr=x, fold_ptr=fold, end_ptr=ends, padded_end_ptr=padded_ends)


@operator(
    lambda x, fold, ends, padded_ends, rows, fmt, policy: (
        x.new_empty((x.shape[1], rows), dtype=torch_dtype(fmt)),
        x.new_empty((len(ends), x.shape[1]), dtype=torch.float32),
        x.new_empty(x.shape, dtype=torch_dtype(fmt)),
        x.new_empty(len(x), dtype=torch.float32),
    ),
    _both_by_kernel,
)
def group_rows_and_columns(
    x: torch.Tensor,
    fold: torch.Tensor | None,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    rows: int,
    fmt: Format,
    policy: ScalePolicy,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast the columns of each group as `group_columns`, and its rows.

    Args:
        x: As of `group_columns`, of at most `LONGEST_ROW` columns.
        fold: float32 [groups, columns], contiguous: factors of the rows of a group, which columns do not have; or None.
        ends: As of `group_columns`.
        padded_ends: As of `group_columns`.
        rows: As of `group_columns`.
        fmt: The format.
        policy: The rule for the scales.

    Returns:
        float8 [columns, rows]; float32 [groups, columns]; float8 [rows of x, columns]; float32 [rows of x]. Rows of no
        group have any codes and scales.
    """
    factors = None if fold is None else torch.cat([fold, torch.ones_like(fold[:1])])
    of_row = None if fold is None else GroupOffsets(ends, len(x)).of_row
    by_rows = casts.quantize_dynamic(x, fmt, policy, (1, 0), fold=factors, groups=of_row)
    of_columns = group_columns(x, ends, padded_ends, rows, fmt, policy)
    return *of_columns, by_rows.codes, by_rows.scale_inv.view(-1)


def segment_quantize(
    x: torch.Tensor, segments: torch.Tensor, scale: torch.Tensor, fmt: Format, amax: torch.Tensor | None
) -> torch.Tensor:
    """Cast each row with the scale of its segment.

    Rows of no segment have arbitrary codes.

    Args:
        x: float16, bfloat16 or float32 [rows, columns].
        segments: int32 [rows], as of `segment_amax`.
        scale: float32 [count], or [count, columns].
        fmt: Format of the codes.
        amax: max |x| of the shape of `scale`, which may save a pass over x; None if it is unknown.
    """
    if takes(x, fmt):
        plan = plans().group_cast(*x.shape, len(scale), name_of(x.dtype), fmt, columns=scale.ndim == 2)
        given = {"x_ptr": x.contiguous(), "group_ptr": segments, "scale_ptr": scale.contiguous()}
        return launch(plan, x.device, **given)[0]
    of_rows = torch.cat([scale, torch.ones_like(scale[:1])]).index_select(0, segments)
    return casts.quantize(x, of_rows if scale.ndim == 2 else of_rows[:, None], fmt, amax)


def zero_rows(y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return y [n, ...] with zeros where `keep`, bool [n], is False.

    y must be a new tensor: it may be changed in place.
    """
    if y.is_contiguous() and launches(y):
        fill_rows_with_zeros(y, keep)
        return y
    return torch.where(keep.view(-1, *(1 for _ in y.shape[1:])), y, 0)


def _transposed_by_kernel(codes: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    plan = plans().transpose_rows(
        len(codes) if source is None else len(source), codes.shape[1], index=source is not None
    )
    given = {"q_ptr": codes.contiguous().view(torch.uint8), "source_ptr": source}
    return launch(plan, codes.device, **given)[0].view(codes.dtype)


# an operator, because a compiler's code stores transposed bytes one by one
@operator(
    lambda codes, source: codes.new_empty((codes.shape[1], codes.shape[0] if source is None else source.shape[0])),
    _transposed_by_kernel,
)
def transposed_rows(codes: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """Return contiguous transposed codes in the order of `source`.

    Args:
        codes: float8 [rows, columns].
        source: int32 [p], the row of each column of the result; a negative entry gives zeros. None keeps the order of
            the rows, whose number 16 must divide.

    Returns:
        float8 [columns, p].
    """
    # as bytes, because few operators know float8; the byte 0 is the value 0
    taken = codes.view(torch.uint8)
    if source is not None and len(codes):
        taken = torch.where((source >= 0)[:, None], taken[source.clamp(min=0)], 0)
    elif source is not None:
        taken = taken.new_zeros((len(source), codes.shape[1]))
    return taken.t().contiguous().view(codes.dtype)


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """Raise for offsets on a CPU that fall or exceed `rows`.

    Offsets on other devices, which the host would have to wait for, and offsets under a compiler are not checked.

    Args:
        offsets: int32 or int64, at least one.
        rows: The number of rows.

    Raises:
        Fp8Error: The offsets fall, are negative, or exceed `rows`.
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
    """Return a bool scalar: whether the offsets are valid.

    Valid offsets begin at 0 or above, never fall and end at `rows` or before. There must be at least one.
    """
    return (offsets.diff(prepend=offsets.new_zeros(1)) >= 0).all() & (offsets[-1] <= rows)


@operator(lambda y, keep: None, mutates=("y",))
def fill_rows_with_zeros(y: torch.Tensor, keep: torch.Tensor) -> None:
    """Zero entries of y whose `keep` is False, in place.

    y is [n, ...], `keep` bool [n]. Entries that are kept are not read, so this is fast where few are zeroed.
    """
    if not (takes(y) and y.is_contiguous()):
        y.masked_fill_(~keep.view(-1, *(1 for _ in y.shape[1:])), 0)
    elif y.numel():
        plan = plans().fill_rows_with_zeros(len(keep), y.numel() // len(keep), name_of(y.dtype))
        launch(plan, y.device, y_ptr=y, keep_ptr=keep.view(torch.uint8))
