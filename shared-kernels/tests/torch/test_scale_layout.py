"""Scale layouts: the parts of a weight, however it is cut, have the keys, scales and codes of the whole."""

import itertools

import pytest
import torch

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, dispatch

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128")
SHAPES = ((5, 7), (128, 128), (200, 300), (3, 130, 150), (1, 1), (0, 4))


def parts_of(weight, dim, ranks):
    """Yield each rank's part as FSDP2 cuts it, with its geometry; the last ones may be empty."""
    chunk = -(-weight.shape[dim] // ranks)
    for rank in range(ranks):
        start = min(rank * chunk, weight.shape[dim])
        length = min(chunk, weight.shape[dim] - start)
        geometry = ShardGeometry(full_shape=weight.shape, dim=dim, first_index=rank * chunk)
        yield weight.narrow(dim, start, length).contiguous(), geometry


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("shape", "ranks"), list(itertools.product(SHAPES, (1, 2, 3, 5))))
def test_parts_make_the_codes_of_the_whole(granularity, shape, ranks):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    layout = ScaleLayout.of(CastRecipe(granularity=granularity))
    if granularity == "blockwise_128x128":
        codes, scales = dispatch.cast_blockwise(weight, layout.fmt, (128, 128), layout.cast.policy)[:2]
    else:
        codes, scales = layout.cast_whole(weight)[:2]
    for dim in range(len(shape)):
        parts = list(parts_of(weight, dim, ranks))
        keys = torch.stack([layout.keys(part, geometry) for part, geometry in parts]).amax(0)
        agreed = layout.scales(keys, weight.shape)
        assert torch.equal(agreed, scales), f"cut along {dim}"
        own = [layout.cast_part(part, agreed, geometry).view(torch.uint8) for part, geometry in parts]
        assert torch.equal(torch.cat(own, dim), codes.view(torch.uint8)), f"cut along {dim}"


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("first", [0, 3, 129, 200, 999])
def test_padding_past_the_end_has_scale_one(granularity, first):
    layout = ScaleLayout.of(CastRecipe(granularity=granularity))
    weight = torch.full((200, 130), 3.0)
    scales = layout.cast_whole(weight).scale
    geometry = ShardGeometry(full_shape=weight.shape, first_index=first)
    wide = layout.of_part(scales, torch.Size((150, 130)), geometry).broadcast_to(150, 130)
    present = max(0, min(150, 200 - first))
    assert (wide[:present] == 448 / 3.0).all()
    assert granularity == "tensorwise" or (wide[present:] == 1).all()


def test_other_granularities_are_no_weights():
    with pytest.raises(Fp8Error, match="Weights cannot be cast with dynamic blockwise_1x128 scaling"):
        ScaleLayout.of(CastRecipe(granularity="blockwise_1x128"))
