"""Grids of scales: the parts of a weight, however it is cut, have the amax bits, scales and codes of the whole."""

import itertools

import pytest
import torch

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.sharding.scale_grid import Region, ScaleGrid

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128")
SHAPES = ((5, 7), (128, 128), (200, 300), (3, 130, 150), (1, 1), (0, 4), (4, 0))
KINDS = list(itertools.product(GRANULARITIES, (False, True), (False, True)))


def grid_of(granularity, **options):
    return ScaleGrid(CastRecipe(granularity=granularity), **options)


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


def same_bits(a, b):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def codes_of_parts(grid, parts, full_shape):
    """Return the codes of each part with the scales that all agree on, and these scales."""
    bits = torch.stack([grid.amax_bits(part, region) for part, region in parts]).amax(0)
    scales = grid.scales(bits, full_shape)
    return [grid.quantize_part(part, scales, region) for part, region in parts], scales


@pytest.mark.parametrize(("granularity", "stacked", "transposed"), KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_make_the_codes_of_the_whole(granularity, stacked, transposed, ranks):
    grid = grid_of(granularity, stacked=stacked, transposed=transposed)
    for shape in [shape for shape in SHAPES if len(shape) == 3 or not stacked]:
        weight = random_weight(shape)
        whole = grid.quantize_whole(weight)
        assert tuple(whole.scale.shape) == grid.shape(weight.shape)
        for dim in range(len(shape)):
            codes, scales = codes_of_parts(grid, list(parts_of(weight, dim, ranks)), weight.shape)
            assert same_bits(scales, whole.scale), f"{shape} cut along {dim}"
            joined = torch.cat([own.view(torch.uint8) for own in codes], dim)
            assert torch.equal(joined, whole.codes.view(torch.uint8)), f"{shape} cut along {dim}"


@pytest.mark.parametrize(("granularity", "stacked", "transposed"), KINDS)
def test_parts_that_are_cut_along_two_dimensions(granularity, stacked, transposed):
    grid = grid_of(granularity, stacked=stacked, transposed=transposed)
    weight = random_weight((2, 200, 300))
    parts = []
    for rows, columns in itertools.product(((0, 90), (90, 200)), ((0, 140), (140, 300))):
        part = weight[:, rows[0] : rows[1], columns[0] : columns[1]].contiguous()
        parts.append((part, Region(weight.shape, (0, rows[0], columns[0]))))
    whole = grid.quantize_whole(weight)
    codes, scales = codes_of_parts(grid, parts, weight.shape)
    assert same_bits(scales, whole.scale)
    upper, lower = (torch.cat([own.view(torch.uint8) for own in pair], -1) for pair in (codes[:2], codes[2:]))
    assert torch.equal(torch.cat([upper, lower], -2), whole.codes.view(torch.uint8))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_experts_are_scaled_like_matrices_of_their_own(granularity):
    weight = random_weight((3, 130, 150))
    made = grid_of(granularity, stacked=True).quantize_whole(weight)
    for expert in range(3):
        alone = grid_of(granularity).quantize_whole(weight[expert])
        assert same_bits(made.codes[expert], alone.codes)
        assert torch.equal(made.scale[expert].reshape(-1), alone.scale.reshape(-1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_transposed_weight_has_the_scales_of_its_transpose(granularity):
    weight = random_weight((200, 300))
    made = grid_of(granularity, transposed=True).quantize_whole(weight)
    plain = grid_of(granularity).quantize_whole(weight.t().contiguous())
    assert same_bits(made.codes.t().contiguous(), plain.codes)
    assert torch.equal(made.scale.reshape(-1), plain.scale.t().reshape(-1) if plain.scale.ndim else plain.scale.view(1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("first", [0, 3, 129, 200, 999])
def test_padding_past_the_end_has_scale_one(granularity, first):
    grid = grid_of(granularity)
    weight = torch.full((200, 130), 3.0)
    scales = grid.quantize_whole(weight).scale
    wide = grid.of_part(scales, torch.Size((150, 130)), Region.along(0, first, weight.shape)).broadcast_to(150, 130)
    present = max(0, min(150, 200 - first))
    assert (wide[:present] == 448 / 3.0).all()
    assert granularity == "tensorwise" or (wide[present:] == 1).all()


@pytest.mark.parametrize(("granularity", "stacked", "transposed"), KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-40])
def test_what_is_not_an_ordinary_number_reaches_the_scale_of_its_block_alone(granularity, stacked, transposed, value):
    grid = grid_of(granularity, stacked=stacked, transposed=transposed)
    weight = torch.ones(2, 130, 150)
    weight[1, 129, 140] = value
    whole = grid.quantize_whole(weight)
    codes, scales = codes_of_parts(grid, list(parts_of(weight, 1, 3)), weight.shape)
    assert same_bits(scales, whole.scale)
    joined = torch.cat([own.view(torch.uint8) for own in codes], 1)
    assert torch.equal(joined, whole.codes.view(torch.uint8))
    if grid.block is not None:
        assert (
            grid.of_part(scales, weight.shape, Region.whole(weight.shape)).broadcast_to(weight.shape)[0] == 448
        ).all()


@pytest.mark.parametrize(("granularity", "stacked", "transposed"), KINDS)
def test_a_changed_part_is_seen_beside_its_codes(granularity, stacked, transposed):
    grid = grid_of(granularity, stacked=stacked, transposed=transposed)
    part, region = next(parts_of(random_weight((4, 130, 150)), 1, 2))
    bits = grid.amax_bits(part, region)
    scales = grid.scales(bits, region.full_shape)
    codes, changed = grid.quantize_and_compare(part, scales, bits, region)
    assert same_bits(codes, grid.quantize_part(part, scales, region))
    assert not changed
    assert grid.quantize_and_compare(part * 2, scales, bits, region)[1]


def test_which_cuts_give_parts_scales_of_their_own():
    assert [grid_of("tensorwise").divides(dim, 2) for dim in (0, 1)] == [False, False]
    assert [grid_of("rowwise").divides(dim, 2) for dim in (0, 1)] == [True, False]
    assert [grid_of("rowwise", transposed=True).divides(dim, 2) for dim in (0, 1)] == [False, True]
    assert [grid_of("tensorwise", stacked=True).divides(dim, 3) for dim in (0, 1, 2)] == [True, False, False]
    assert [grid_of("blockwise_128x128").divides(dim, 2) for dim in (0, 1)] == [True, True]


def test_grids_that_scale_alike_are_equal():
    assert grid_of("rowwise") == grid_of("rowwise")
    assert len({grid_of("rowwise"), grid_of("rowwise"), grid_of("rowwise", transposed=True)}) == 2


def test_other_granularities_are_no_weights():
    with pytest.raises(Fp8Error, match="Weights cannot be cast with dynamic blockwise_1x128 scaling"):
        grid_of("blockwise_1x128")
