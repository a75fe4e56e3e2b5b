"""Grids of scales: the parts of a weight, however it is cut, have the amax bits, scales and codes of the whole."""

import itertools

import pytest
import torch

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from tests.helpers.tensors import same

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128")
SHAPES = ((5, 7), (128, 128), (200, 300), (3, 130, 150), (1, 1), (0, 4), (4, 0))
kinds = pytest.mark.parametrize(
    ("granularity", "stacked", "transposed"), list(itertools.product(GRANULARITIES, (False, True), (False, True)))
)


def grid_of(granularity, stacked=False, transposed=False):
    return ScaleGrid(CastRecipe(granularity=granularity), stacked=stacked, transposed=transposed)


def parts_of(weight, dim, ranks):
    """Yield each rank's part as FSDP2 cuts it, with its region; the last ones may be empty."""
    chunk = -(-weight.shape[dim] // ranks)
    for rank in range(ranks):
        start = min(rank * chunk, weight.shape[dim])
        length = min(chunk, weight.shape[dim] - start)
        yield weight.narrow(dim, start, length).contiguous(), Region.along(dim, rank * chunk, weight.shape)


def random_weight(shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 3, max(1, shape[-1]))[: shape[-1]]


def assert_whole(grid, weight, parts):
    """Compare the codes of parts, with the scales that all agree on, with those of the whole; return these scales."""
    whole = grid.quantize_whole(weight)
    assert tuple(whole.scale.shape) == grid.shape(weight.shape)
    bits = torch.stack([grid.amax_bits(part, region) for part, region in parts]).amax(0)
    scales = grid.scales(bits, weight.shape)
    assert same(scales, whole.scale)
    for part, region in parts:
        place = tuple(slice(start, start + n) for start, n in zip(region.offset, part.shape, strict=True))
        assert same(grid.quantize_part(part, scales, region), whole.codes[place])
    return scales


@kinds
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_make_the_codes_of_the_whole(granularity, stacked, transposed, ranks):
    for shape in [shape for shape in SHAPES if len(shape) == 3 or not stacked]:
        for dim in range(len(shape)):
            weight = random_weight(shape)
            assert_whole(grid_of(granularity, stacked, transposed), weight, list(parts_of(weight, dim, ranks)))
    weight, cuts = random_weight((2, 200, 300)), itertools.product(((0, 90), (90, 200)), ((0, 140), (140, 300)))
    parts = [(weight[:, a:b, c:d].contiguous(), Region(weight.shape, (0, a, c))) for (a, b), (c, d) in cuts]
    assert_whole(grid_of(granularity, stacked, transposed), weight, parts)


@kinds
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-40])
def test_special_values_change_only_their_blocks_scale(granularity, stacked, transposed, value):
    grid, weight = grid_of(granularity, stacked, transposed), torch.ones(2, 130, 150)
    weight[1, 129, 140] = value
    scales = assert_whole(grid, weight, list(parts_of(weight, 1, 3)))
    if grid.block is not None:
        wide = grid.of_part(scales, weight.shape, Region.whole(weight.shape)).broadcast_to(weight.shape)
        assert (wide[0] == 448).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_experts_and_transposed_weights_are_scaled_like_matrices_of_their_own(granularity):
    weight = random_weight((3, 130, 150))
    stacked = grid_of(granularity, stacked=True).quantize_whole(weight)
    for expert in range(3):
        alone = grid_of(granularity).quantize_whole(weight[expert])
        turned = grid_of(granularity, transposed=True).quantize_whole(weight[expert].t().contiguous())
        assert same(stacked.codes[expert], alone.codes)
        assert same(turned.codes.t(), alone.codes)
        assert torch.equal(stacked.scale[expert].reshape(-1), alone.scale.reshape(-1))
        scale = turned.scale.t() if turned.scale.ndim else turned.scale
        assert torch.equal(scale.reshape(-1), alone.scale.reshape(-1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("first", [0, 3, 129, 200, 999])
def test_padding_past_the_end_has_scale_one(granularity, first):
    grid, weight = grid_of(granularity), torch.full((200, 130), 3.0)
    scales = grid.quantize_whole(weight).scale
    wide = grid.of_part(scales, torch.Size((150, 130)), Region.along(0, first, weight.shape)).broadcast_to(150, 130)
    present = max(0, min(150, 200 - first))
    assert (wide[:present] == 448 / 3.0).all()
    assert granularity == "tensorwise" or (wide[present:] == 1).all()


@kinds
def test_a_changed_part_is_detected_in_the_cast(granularity, stacked, transposed):
    grid = grid_of(granularity, stacked, transposed)
    part, region = next(parts_of(random_weight((4, 130, 150)), 1, 2))
    bits = grid.amax_bits(part, region)
    scales = grid.scales(bits, region.full_shape)
    codes, changed = grid.quantize_and_compare(part, scales, bits, region)
    assert same(codes, grid.quantize_part(part, scales, region))
    assert not changed
    assert grid.quantize_and_compare(part * 2, scales, bits, region)[1]


def test_grids_that_scale_alike_are_equal_and_other_granularities_are_no_weights():
    assert len({grid_of("rowwise"), grid_of("rowwise"), grid_of("rowwise", transposed=True)}) == 2
    with pytest.raises(Fp8Error, match="Weights cannot be cast with dynamic blockwise_1x128 scaling"):
        grid_of("blockwise_1x128")
