"""Groups of rows, padded and turned: the kernel and the reference agree, and padding is zero."""

import numpy as np
import pytest
import torch

from fp8_common.torch import _grouped_products as grouped_products
from fp8_common.torch._row_groups import RowGroups


@pytest.mark.matrix(ends=[[3, 3, 20, 37], [0, 0, 0, 0], [16, 32, 32, 48]])
def test_padded_groups_are_turned_as_by_the_reference(ends, monkeypatch):
    groups = RowGroups(torch.tensor(ends), 48)
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 127, (48, 32), dtype=np.uint8))
    found = []
    for choice in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", choice)
        padded = grouped_products._Padded(groups)
        found.append(padded.transposed(codes.view(torch.float8_e4m3fn)).view(torch.uint8))
        assert (padded.offsets % 16 == 0).all()
    assert torch.equal(*found)
    starts = [0, *padded.offsets.tolist()[:-1]]
    for start, first, end in zip(starts, [0, *ends[:-1]], ends, strict=True):
        assert torch.equal(found[0][:, start : start + end - first], codes[first:end].t())
    assert int(found[0].long().sum()) == int(codes[: ends[-1]].long().sum()), "all else is zero"
