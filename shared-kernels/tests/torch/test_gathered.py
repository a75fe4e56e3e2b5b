"""Gathered weights: FP8 codes that act as a weight, made and brought up to date as FSDP2 wants it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8_common import CastRecipe
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, finish_gather
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from tests.helpers.tensors import reloaded


def test_a_gather_is_wrapped_once_and_refilled_in_place():
    grid, buffer, shape = ScaleGrid(CastRecipe(granularity="rowwise")), torch.zeros(6, dtype=torch.uint8), (2, 2)
    buffer[:4] = torch.tensor([1.0, 2.0, -4.0, 0.5]).to(torch.float8_e4m3fn).view(torch.uint8)
    scale_inv = torch.tensor([[0.5], [1.0]])
    whole, freed = finish_gather(buffer, scale_inv, grid, torch.Size(shape), torch.bfloat16)
    assert freed == (), "the codes are FSDP2's own buffer"
    assert (whole.codes.data_ptr(), whole.dtype) == (buffer.data_ptr(), torch.bfloat16)
    assert whole.tolist() == [[0.5, 1.0], [-4.0, 0.5]]
    buffer[:4] = buffer[:4].flip(0)
    parameter = torch.nn.Parameter(whole)
    assert finish_gather(buffer, scale_inv / 2, grid, torch.Size(shape), torch.bfloat16, out=parameter) is None
    assert parameter.tolist() == [[0.125, -1.0], [1.0, 0.5]]


def gathered_weight():
    codes = torch.tensor([[1.0, 2.0], [-4.0, 0.5]]).to(torch.float8_e4m3fn)
    return GatheredWeight(codes, torch.tensor(0.5), "e4m3", torch.float32)


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
    loaded = reloaded(gathered_weight())
    assert isinstance(loaded, GatheredWeight)
    assert loaded.tolist() == gathered_weight().tolist()


def test_a_hash_for_compilers_names_what_a_graph_depends_on():
    one = gathered_weight()
    assert one._stable_hash_for_caching() == gathered_weight()._stable_hash_for_caching()
    rows = GatheredWeight(one.codes, torch.ones(2, 1), "e4m3", torch.float32)
    half = GatheredWeight(one.codes, one.scale_inv, "e4m3", torch.bfloat16)
    assert len({tensor._stable_hash_for_caching() for tensor in (one, rows, half)}) == 3
