"""Casts of large tensors on a CPU go piece by piece; codes and strides are those of a cast of the whole."""

import pytest
import torch

from fp8_common import POWER_OF_2
from fp8_common.formats import get_format
from fp8_common.torch import rounding
from fp8_common.torch.casts import quantize_dynamic

FMT = get_format("e4m3")


@pytest.fixture
def in_pieces(monkeypatch):
    """Casts of 100 elements and more are cut; returns the numbers of pieces that were asked for."""
    monkeypatch.setattr(rounding, "PIECE", 50 // torch.get_num_threads() or 1)
    asked, count = [], rounding._pieces
    monkeypatch.setattr(rounding, "_pieces", lambda x, fits: asked.append(count(x, fits)) or asked[-1])
    return asked


def values(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    x.view(-1)[[3, 70, 71, -1]] = torch.tensor([torch.inf, torch.nan, -0.0, 3e38])
    return x.to(dtype)


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.matrix(
    shape=[(1000,), (37, 64), (3, 50, 8), (2, 4, 5, 16)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    rows=[True, False],
    known=[True, False],
)
def test_pieces_have_the_codes_of_the_whole(in_pieces, shape, dtype, rows, known):
    x = values(shape, dtype)
    x = x.nan_to_num(posinf=9.0, neginf=-9.0) if known else x
    scale = torch.rand(shape[0], *(1 for _ in shape[1:])) * 100 if rows else torch.tensor(30.0)
    found = rounding.quantize(x, scale, FMT, x.float().abs().max())
    assert in_pieces[-1] > 1
    # one element after the other is the definition
    flat, scales = x.reshape(-1), scale.expand(shape).reshape(-1)
    wanted = torch.cat([rounding.quantize(one, own, FMT) for one, own in zip(flat.split(1), scales, strict=True)])
    assert in_pieces[-1] < 2
    assert torch.equal(bits(found), bits(wanted.view(shape)))
    assert found.stride() == x.stride()


def cast(x, block):
    made = quantize_dynamic(x, FMT, POWER_OF_2, block)
    return made.codes, made.scale


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (16, 8)])
def test_blocks_of_pieces_keep_their_scales(in_pieces, monkeypatch, block):
    x = values((256, 384), torch.bfloat16).nan_to_num(posinf=9.0)
    found = cast(x, block)
    assert in_pieces[-1] > 1
    monkeypatch.setattr(rounding, "PIECE", 2**40)
    for actual, wanted in zip(found, cast(x, block), strict=True):
        assert torch.equal(bits(actual), bits(wanted))


TWO = torch.tensor(2.0)
AS_A_WHOLE = {
    "turned": (torch.ones(40, 30).t(), TWO),
    "one row": (torch.ones(1, 1000), TWO),
    "differentiated": (torch.ones(30, 30, requires_grad=True), TWO),
    "meta": (torch.ones(30, 30, device="meta"), TWO.to("meta")),
    "small": (torch.ones(9, 9), TWO),
    "a scale that widens the result": (torch.ones(200, 1), torch.ones(200, 3)),
}


@pytest.mark.parametrize("name", AS_A_WHOLE)
def test_others_are_cast_as_a_whole(in_pieces, name):
    x, scale = AS_A_WHOLE[name]
    found = rounding.quantize(x, scale, FMT)
    assert found.shape == torch.broadcast_shapes(x.shape, scale.shape)
    assert found.shape != x.shape or found.stride() == x.stride()
    assert max(in_pieces) < 2
