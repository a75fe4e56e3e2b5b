"""Gathered weights: FP8 codes that act as a weight, made and brought up to date as FSDP2 wants it."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8_common import CastRecipe
from fp8_common.torch.sharding.fsdp import pad_rows
from fp8_common.torch.sharding.gathered import GatheredWeight, finish_gather
from fp8_common.torch.sharding.scale_grid import ScaleGrid

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128")


def gathered_buffer(granularity, shape=(200, 136), factor=1.0):
    """Return a grid, the weight's own cast, and the buffer in which two ranks' codes arrive, padded at the end."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * factor
    grid = ScaleGrid(CastRecipe(granularity=granularity))
    made = grid.quantize_whole(weight)
    return grid, made, pad_rows(made.codes, torch.Size((shape[0] + 2, *shape[1:]))).view(-1)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_gather_is_wrapped_once_and_refilled_in_place(granularity):
    grid, made, buffer = gathered_buffer(granularity)
    scale = made.scale.clone()
    whole, freed = finish_gather(buffer, scale, grid, made.codes.shape, torch.bfloat16)
    assert freed == (), "the codes are FSDP2's own buffer"
    assert whole.codes.data_ptr() == buffer.data_ptr()
    assert whole.scale is scale
    assert (whole.shape, whole.dtype) == (made.codes.shape, torch.bfloat16)
    before = whole.dequantize()
    later = gathered_buffer(granularity, factor=5.0)
    buffer.copy_(later[2])
    scale.copy_(later[1].scale)
    parameter = torch.nn.Parameter(whole)
    assert finish_gather(buffer, scale, grid, made.codes.shape, torch.bfloat16, out=parameter) is None
    torch.testing.assert_close(parameter.dequantize(), before * 5, rtol=0.2, atol=0.05)
    other = scale * 2
    finish_gather(buffer, other, grid, made.codes.shape, torch.bfloat16, out=parameter)
    torch.testing.assert_close(parameter.dequantize(), whole.dequantize() / 2, rtol=0, atol=0)


def gathered_weight():
    codes = torch.tensor([[1.0, 2.0], [-4.0, 0.5]]).to(torch.float8_e4m3fn)
    return GatheredWeight(codes, torch.tensor(2.0), "e4m3", torch.float32)


def test_it_reads_as_the_values_it_stands_for():
    weight, values = gathered_weight(), torch.tensor([[0.5, 1.0], [-2.0, 0.25]])
    assert torch.equal(weight + 0, values)
    assert weight.tolist() == values.tolist()
    np.testing.assert_array_equal(weight.numpy(), values.numpy())
    assert torch.equal(torch.from_dlpack(weight), values)
    assert isinstance(weight.detach().view(2, 2), GatheredWeight)
    assert repr(weight) == "GatheredWeight(shape=(2, 2), fmt='e4m3', dtype=torch.float32)"
    with pytest.warns(UserWarning, match="multiplied outside of its layer"):
        assert torch.equal(F.linear(torch.eye(2), weight), values.t())


def test_it_is_not_written_to():
    with pytest.raises(RuntimeError, match="would write to a gathered FP8 weight"):
        gathered_weight().mul_(2)
    with pytest.raises(RuntimeError, match="would write to a gathered FP8 weight"):
        torch.ones(2, 2, out=gathered_weight())


def test_it_is_saved_and_loaded():
    stored = io.BytesIO()
    torch.save(gathered_weight(), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    assert isinstance(loaded, GatheredWeight)
    assert loaded.tolist() == gathered_weight().tolist()


def test_a_hash_for_compilers_names_what_a_graph_depends_on():
    one = gathered_weight()
    assert one._stable_hash_for_caching() == gathered_weight()._stable_hash_for_caching()
    rows = GatheredWeight(one.codes, torch.ones(2, 1), "e4m3", torch.float32)
    half = GatheredWeight(one.codes, one.scale, "e4m3", torch.bfloat16)
    assert len({tensor._stable_hash_for_caching() for tensor in (one, rows, half)}) == 3
