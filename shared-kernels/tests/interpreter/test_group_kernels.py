"""Kernels of rows in groups equal the NumPy definition bit for bit, whatever groups are empty."""

import numpy as np
import pytest
import torch

import fp8_common as f8
import kernel_inputs
from fp8_common._kernels import groups
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton, casts
from fp8_common.torch_layers.linear import group_offsets, grouped_matmul
from fp8_common.torch_layers.linear.grouped import RowGroups
from kernel_inputs import DTYPES, FORMATS, SEED, calm, planted, tensor

# rows of the groups: empty ones at the start, in the middle and at the end, several in a tile, and rows of no group
GROUPS = {"many": [0, 5, 5, 130, 131, 260, 290, 290], "one": [300], "none": [0, 0], "short": [7, 300]}


def group_of_rows(name, rows):
    """Return the ends of groups within so many rows, and the group of each row."""
    ends = np.minimum(GROUPS[name], rows)
    return ends, np.searchsorted(ends, np.arange(rows), side="right").astype(np.int32)


@pytest.mark.matrix(
    dtype=list(DTYPES), fmt=FORMATS, shape=[(300, 517), (128, 160), (300, 16)], name=list(GROUPS), columns=[False, True]
)
def test_groups_of_rows_are_cast_with_scales_of_their_own(dtype, fmt, shape, name, columns):
    x, (ends, group) = planted(shape, dtype, fmt), group_of_rows(name, shape[0])
    found = group_offsets.segment_amax(tensor(x), tensor(group), len(ends), columns)
    starts, axis = [0, *ends[:-1]], 0 if columns else None
    expected = np.stack([f8.amax(x[start:end], axis=axis) for start, end in zip(starts, ends, strict=True)])
    assert_same_bits(found, expected)
    scale, inside = f8.amax_to_scale(expected, fmt), x[: ends[-1]]  # other rows are not written
    codes = group_offsets.segment_quantize(tensor(x), tensor(group), tensor(scale), f8.formats.get_format(fmt), None)
    of_rows = scale[group[: ends[-1]]]
    expected = f8.quantize(inside, of_rows if columns else of_rows[:, None], fmt)
    assert_same_bits(codes[: ends[-1]], expected, fmt=fmt, source=inside)


@pytest.mark.matrix(dtype=list(DTYPES), shape=[(300, 517), (128, 160), (9, 16384 + 8)], name=list(GROUPS))
def test_rows_are_cast_with_the_fold_of_their_group(dtype, shape, name):
    x, (ends, group) = planted(shape, dtype, "e4m3"), group_of_rows(name, shape[0])
    folds = np.abs(calm((len(ends) + 1, shape[1]), "float32")) + np.float32(0.1)
    made = casts.quantize_dynamic(tensor(x), f8.E4M3, f8.CANONICAL, (1, 0), fold=tensor(folds), groups=tensor(group))
    with np.errstate(all="ignore"):
        want = f8.quantize_rowwise(x.astype(np.float32) * folds[group], "e4m3")
    assert_same_bits(made.scale, want.scale)
    assert_same_bits(made.scale_inv, f8.numerics.reciprocal(want.scale))
    assert_same_bits(made.codes, want.data, fmt="e4m3", source=x)


@pytest.mark.matrix(shape=[(300, 517), (128, 160), (5, 16)], p=[16, 272])
def test_rows_are_turned_in_the_order_of_an_index(shape, p):
    rng = np.random.default_rng(SEED)
    q = rng.integers(0, 256, shape, dtype=np.uint8)
    source = rng.integers(-1, shape[0], p, dtype=np.int32)
    expected = np.where(source[:, None] >= 0, q[source], 0).T
    assert_same_bits(group_offsets.transposed_rows(tensor(q), tensor(source)), np.ascontiguousarray(expected))


@pytest.mark.matrix(dtype=list(DTYPES), shape=[(300, 517), (7, 3, 5), (4, 1, 1024)])
def test_rows_that_are_not_kept_become_zero(dtype, shape):
    y, keep = planted(shape, dtype, "e4m3"), np.random.default_rng(SEED).random(shape[0]) < 0.5
    expected = y.copy()
    expected[~keep] = 0
    cleared = group_offsets.zero_rows(tensor(y), tensor(keep))
    assert_same_bits(cleared, expected)


ENDS = {
    "uneven": [3, 3, 20, 37], "empty": [0, 0, 0, 0], "full": [16, 32, 32, 48], "one row": [0, 1, 1, 1],
    "long": [0, 400, 401, 700],
}  # fmt: skip


@pytest.mark.matrix(
    ends=list(ENDS),
    dtype=list(DTYPES),
    fmt=["e4m3", "e5m2"],
    index=[torch.int32, torch.int64],
    policy=[f8.CANONICAL, f8.POWER_OF_2],
)
def test_columns_of_groups_are_cast_and_turned_in_one_launch(ends, dtype, fmt, index, policy, monkeypatch):
    rows = max(48, ENDS[ends][-1] + 3)
    cast, values = f8.CastRecipe(format=fmt, granularity="rowwise", policy=policy), planted((rows, 80), dtype, fmt)
    values[0, 0] = np.nan  # whose scale must not reach the padding
    x = tensor(values)
    launched, run, found = [], _triton.run, []
    monkeypatch.setattr(_triton, "run", lambda plan, *_, **named: (launched.append(plan.name), run(plan, *_, **named)))
    for backend in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
        groups = RowGroups(torch.tensor(ENDS[ends], dtype=index, device=kernel_inputs.DEVICE), rows)
        found.append(groups.quantize_over_rows(x, cast))
    assert launched == ["group_columns"]
    made, wanted = found
    assert grouped_matmul.is_turned(made)
    assert not grouped_matmul.is_turned(wanted)
    assert_same_bits(made.scale_inv.mT, wanted.scale_inv)
    last = int(groups.padded[1][-1])
    turned = group_offsets.transposed_rows(wanted.codes, groups.source)
    assert_same_bits(made.codes[:, :last], turned[:, :last], fmt=fmt)
    # where they are multiplied group after group, they are rows again
    assert_same_bits(
        grouped_matmul._as_rows(made, groups).codes[: ENDS[ends][-1]], wanted.codes[: ENDS[ends][-1]], fmt=fmt
    )


@pytest.mark.matrix(ends=list(ENDS), dtype=list(DTYPES), fmt=["e4m3", "e5m2"], columns=[80, 517], folds=[False, True])
def test_rows_and_columns_of_groups_are_cast_in_one_launch(ends, dtype, fmt, columns, folds, monkeypatch):
    rows = max(48, ENDS[ends][-1] + 3)
    cast, values = f8.CastRecipe(format=fmt, granularity="rowwise"), planted((rows, columns), dtype, fmt)
    values[0, 0] = np.nan  # whose scales must not reach other rows and columns
    x = tensor(values)
    inverses = tensor(np.abs(calm((len(ENDS[ends]), columns, 1), "float32")) + np.float32(0.1)) if folds else None
    launched, run, results = [], _triton.run, []
    monkeypatch.setattr(_triton, "run", lambda plan, *_, **named: (launched.append(plan.name), run(plan, *_, **named)))
    of_rows = RowGroups(torch.tensor(ENDS[ends], dtype=torch.int32, device=kernel_inputs.DEVICE), rows)
    for backend in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
        if folds:
            results.append(of_rows.quantize_folded(x, inverses, cast, both=True))
        else:
            results.append(of_rows.quantize(x, cast, None, record=False, both=True))
    assert launched == ["group_columns"]
    both, by_rows = results
    by_columns, last, end = of_rows.quantize_over_rows(x, cast), int(of_rows.padded[1][-1]), ENDS[ends][-1]
    assert by_rows.transposed is None
    assert_same_bits(both.scale_inv[:end], by_rows.scale_inv[:end])
    assert_same_bits(both.codes[:end], by_rows.codes[:end], fmt=fmt)
    assert_same_bits(both.transposed.scale_inv.mT, by_columns.scale_inv)
    turned = group_offsets.transposed_rows(by_columns.codes, of_rows.source)
    assert_same_bits(both.transposed.codes[:, :last], turned[:, :last], fmt=fmt)


def test_long_rows_of_groups_are_cast_in_a_launch_of_their_own():
    assert group_offsets.LONGEST_ROW == groups.LONGEST_ROW
    x = tensor(calm((3, group_offsets.LONGEST_ROW + 16), "bfloat16"))
    of_rows = RowGroups(torch.tensor([1, 3], dtype=torch.int32, device=kernel_inputs.DEVICE), len(x))
    operand = of_rows.quantize(x, f8.CastRecipe(granularity="rowwise"), None, record=False, both=True)
    assert operand.transposed is None
