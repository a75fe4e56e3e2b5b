"""Groups of rows, padded and transposed: the kernel and the reference agree, and padding is zero."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton
from fp8_common.torch.linear import grouped_matmul, matmul, segments
from fp8_common.torch.linear.grouped import RowGroups
from fp8_common.torch.linear.matmul import row_major
from tests.helpers.kernel_inputs import DTYPES, planted, tensor


@pytest.mark.matrix(ends=[[3, 3, 20, 37], [0, 0, 0, 0], [16, 32, 32, 48]])
def test_padded_groups_are_transposed_as_by_the_reference(ends, monkeypatch):
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 127, (48, 32), dtype=np.uint8))
    found = []
    for choice in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", choice)
        groups = RowGroups(torch.tensor(ends), 48)
        found.append(segments.transposed_rows(codes.view(torch.float8_e4m3fn), groups.source).view(torch.uint8))
        assert (groups.padded[1] % 16 == 0).all()
    assert torch.equal(*found)
    starts = groups.padded[0].tolist()
    for start, first, end in zip(starts, [0, *ends[:-1]], ends, strict=True):
        assert torch.equal(found[0][:, start : start + end - first], codes[first:end].t())
    assert int(found[0].long().sum()) == int(codes[: ends[-1]].long().sum()), "all else is zero"


ENDS = {
    "uneven": [3, 3, 20, 37], "empty": [0, 0, 0, 0], "full": [16, 32, 32, 48], "one row": [0, 1, 1, 1],
    "long": [0, 400, 401, 700],
}  # fmt: skip


@pytest.mark.matrix(ends=list(ENDS), dtype=list(DTYPES), fmt=["e4m3", "e5m2"], index=[torch.int32, torch.int64])
def test_columns_of_groups_are_cast_and_turned_in_one_launch(ends, dtype, fmt, index, monkeypatch):
    rows = max(48, ENDS[ends][-1] + 3)
    cast, x = f8.CastRecipe(format=fmt, granularity="rowwise"), tensor(planted((rows, 80), dtype, fmt))
    launched, run, found = [], _triton.run, []
    monkeypatch.setattr(_triton, "run", lambda plan, *_, **named: (launched.append(plan.name), run(plan, *_, **named)))
    for backend in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
        groups = RowGroups(torch.tensor(ENDS[ends], dtype=index), rows)
        found.append(groups.quantize_over_rows(x, cast))
    assert launched == ["group_columns"]
    made, wanted = found
    assert grouped_matmul.is_turned(made)
    assert not grouped_matmul.is_turned(wanted)
    assert_same_bits(made.scale_inv.mT, wanted.scale_inv)
    last = int(groups.padded[1][-1])
    turned = segments.transposed_rows(wanted.codes, groups.source)
    assert_same_bits(made.codes[:, :last], turned[:, :last], fmt=fmt)
    # where they are multiplied group after group, they are rows again
    assert_same_bits(
        grouped_matmul._as_rows(made, groups).codes[: ENDS[ends][-1]], wanted.codes[: ENDS[ends][-1]], fmt=fmt
    )


@pytest.mark.parametrize("shape", [(48, 32), (33, 16), (33, 7), (1, 128)])
def test_codes_that_lie_by_columns_are_copied_by_the_kernel(shape, monkeypatch):
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 127, shape, dtype=np.uint8))
    codes, launched = codes.view(torch.float8_e4m3fn), []
    by_columns = codes.t().contiguous().t()
    real = segments.transposed_rows
    monkeypatch.setattr(matmul, "transposed_rows", lambda *given: launched.append(1) or real(*given))
    rows = row_major(by_columns)
    assert rows.is_contiguous()
    assert torch.equal(rows.view(torch.uint8), codes.view(torch.uint8))
    # the kernel writes 16 codes at a time; a single row lies by rows, too
    assert len(launched) == (1 if shape in ((48, 32), (33, 16)) else 0)
    assert row_major(codes) is codes
