"""Groups of rows, padded and transposed: the kernel and the reference agree, and padding is zero."""

import numpy as np
import pytest
import torch

from fp8_common.torch_layers.linear import group_offsets, matmul
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.matmul import row_major


@pytest.mark.matrix(ends=[[3, 3, 20, 37], [0, 0, 0, 0], [16, 32, 32, 48]])
def test_padded_groups_are_transposed_as_by_the_reference(ends, monkeypatch):
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 127, (48, 32), dtype=np.uint8))
    found = []
    for choice in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", choice)
        groups = RowGroups(torch.tensor(ends), 48)
        found.append(group_offsets.transposed_rows(codes.view(torch.float8_e4m3fn), groups.source).view(torch.uint8))
        assert (groups.padded[1] % 16 == 0).all()
    assert torch.equal(*found)
    starts = groups.padded[0].tolist()
    for start, first, end in zip(starts, [0, *ends[:-1]], ends, strict=True):
        assert torch.equal(found[0][:, start : start + end - first], codes[first:end].t())
    assert int(found[0].long().sum()) == int(codes[: ends[-1]].long().sum()), "all else is zero"


@pytest.mark.parametrize("shape", [(48, 32), (33, 16), (33, 7), (1, 128)])
def test_codes_that_lie_by_columns_are_copied_by_the_kernel(shape, monkeypatch):
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 127, shape, dtype=np.uint8))
    codes, launched = codes.view(torch.float8_e4m3fn), []
    by_columns = codes.t().contiguous().t()
    real = group_offsets.transposed_rows
    monkeypatch.setattr(matmul, "transposed_rows", lambda *given: launched.append(1) or real(*given))
    rows = row_major(by_columns)
    assert rows.is_contiguous()
    assert torch.equal(rows.view(torch.uint8), codes.view(torch.uint8))
    # the kernel writes 16 codes at a time; a single row lies by rows, too
    assert len(launched) == (1 if shape in ((48, 32), (33, 16)) else 0)
    assert row_major(codes) is codes
