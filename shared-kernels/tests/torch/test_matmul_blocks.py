"""Block-wise matmuls as cuBLAS is asked for them: layouts and sizes, on a double that checks both."""

import pytest
import torch

from fp8_common import CANONICAL
from fp8_common.formats import get_format
from fp8_common.presets import mx
from fp8_common.torch import casts
from fp8_common.torch.blocks import expand_blocks
from fp8_common.torch_layers.linear import matmul, plan
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid

THIN, SQUARE, MX = (1, 128), (128, 128), (1, 32)


def operand(rows, columns, block):
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    made = casts.quantize_dynamic(x, get_format("e4m3"), mx("rceil") if block == MX else CANONICAL, block)
    return made._replace(block=block)


def decoded(codes, inverse):
    """Return what codes [rows, K] stand for; scales must lie as cuBLAS reads them, in every version of torch."""
    rows, blocks = codes.shape[0], codes.shape[1] // 128
    assert codes.is_contiguous()
    assert codes.shape == (rows, blocks * 128)
    thin = inverse.shape[0] == rows
    assert inverse.shape == (rows if thin else -(-rows // 128), blocks)
    # torch looks at no stride of a dimension of length 1
    strides = (1, rows) if thin else (-(-blocks // 4) * 4, 1)
    assert all(n == 1 or is_ == must for n, is_, must in zip(inverse.shape, inverse.stride(), strides, strict=True))
    wide = inverse.repeat_interleave(128, 1)
    return codes.float() * (wide if thin else wide.repeat_interleave(128, 0)[:rows])


def decoded_mx(codes, scales):
    """Return what codes [rows, K] stand for; MX scales must lie as cuBLAS reads them."""
    rows, columns = codes.shape[0], codes.shape[1] // 32
    across = -(-columns // 4)
    assert codes.is_contiguous()
    assert scales.dtype == torch.float8_e8m0fnu
    assert scales.shape == (-(-rows // 128) * across * 512,)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    places = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return codes.float() * scales.float()[places].repeat_interleave(32, 1)


@pytest.fixture
def products(monkeypatch):
    """Count the matmuls that the double of `scaled_mm` makes."""
    made = []

    def scaled_mm(a, b, a_inverse, b_inverse, scaling, *, out_dtype):
        if scaling == ("BlockWise1x32", "BlockWise1x32"):
            made.append((a.shape[0], a.shape[1], b.shape[1]))
            return (decoded_mx(a, a_inverse) @ decoded_mx(b.t(), b_inverse).t()).to(out_dtype)
        rows = a_inverse.shape[0] == a.shape[0], b_inverse.shape[1] == b.shape[1]
        assert scaling == tuple("BlockWise1x128" if thin else "BlockWise128x128" for thin in rows)
        assert a.shape[0] % 16 == b.shape[1] % 16 == 0
        made.append((a.shape[0], a.shape[1], b.shape[1]))
        return (decoded(a, a_inverse) @ decoded(b.t(), b_inverse.t()).t()).to(out_dtype)

    monkeypatch.setattr(matmul, "multiplies_scaled_blocks", lambda device, mx: True)
    monkeypatch.setattr(matmul, "scaled_mm", scaled_mm)
    return made


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("blocks", "k"), [((THIN, SQUARE), 512), ((SQUARE, THIN), 1024), ((THIN, THIN), 384), ((MX, MX), 160)]
)
def test_matmuls_with_scales_of_blocks_are_the_emulated_ones(products, blocks, k, out_dtype):
    a, b = operand(256, k, blocks[0]), operand(384, k, blocks[1])
    native = matmul.matmul(a, b, MatmulOptions(out_dtype, False))
    assert products == [(256, k, 384)]
    torch.testing.assert_close(native, matmul.matmul(a, b, MatmulOptions(out_dtype, True)))
    assert len(products) == 1, "emulation does not ask the hardware"


@pytest.mark.parametrize(
    ("m", "k", "n", "blocks", "out_dtype"),
    [
        (128, 640, 128, (THIN, SQUARE), torch.float32),
        (128, 640, 128, (SQUARE, THIN), torch.float32),
        (128, 200, 128, (THIN, THIN), torch.float32),
        (120, 512, 128, (THIN, SQUARE), torch.float32),
        (128, 512, 72, (THIN, SQUARE), torch.float32),
        (0, 512, 128, (THIN, SQUARE), torch.float32),
        (128, 512, 128, (SQUARE, SQUARE), torch.float32),
        (128, 512, 128, (MX, THIN), torch.float32),
        (128, 80, 128, (MX, MX), torch.float32),
        (120, 128, 128, (MX, MX), torch.float32),
        (128, 128, 128, (MX, MX), torch.float16),
        (128, 512, 128, (THIN, SQUARE), torch.float16),
    ],
)
def test_unknown_devices_emulate(products, m, k, n, blocks, out_dtype):
    product = matmul.matmul(operand(m, k, blocks[0]), operand(n, k, blocks[1]), MatmulOptions(out_dtype, False))
    assert product.shape == (m, n)
    assert products == []


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_all_three_matmuls_of_a_layer_are_native(products, monkeypatch, recipe):
    monkeypatch.setattr(plan, "should_emulate", lambda device, emulate: False)
    config = LinearConfig(recipe=recipe)
    grid = ScaleGrid(config.weight)
    spec = LinearSpec(config, lambda w, *_: grid.quantize_whole(w))
    x, w = torch.randn(128, 512, requires_grad=True), torch.randn(1024, 512, requires_grad=True)
    fp8_linear(x, w, spec).square().sum().backward()
    assert products == [(128, 512, 1024), (1024, 128, 512), (128, 1024, 512)]


def test_scales_of_rows_that_do_not_fill_a_tile_are_padded():
    scale_inv = torch.tensor([[2.0**-127, 2.0**-126, 1.0], [2.0**127, torch.nan, 0.5]])
    codes = matmul.swizzled(scale_inv).view(torch.uint8)
    assert codes.shape == (512,)
    assert codes[:4].tolist() == [0, 1, 127, 0]
    assert codes[16:20].tolist() == [254, 255, 126, 0]
    assert codes.count_nonzero() == 5


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_with_scales_that_are_no_powers_of_two_operands_are_the_fp8_numbers(products, emulate, out_dtype, monkeypatch):
    a, b = operand(256, 512, THIN), operand(384, 512, SQUARE)
    assert (torch.frexp(a.scale_inv).mantissa != 0.5).any(), "a power of two would leave nothing to round"
    multiplied = []

    def noted(function):
        return lambda x, y, *rest, **named: (multiplied.extend((x, y)), function(x, y, *rest, **named))[1]

    monkeypatch.setattr(matmul, "_multiply", noted(matmul._multiply))
    monkeypatch.setattr(matmul, "scaled_mm", noted(matmul.scaled_mm))
    matmul.matmul(a, b, MatmulOptions(out_dtype, emulate))
    if not emulate:  # the codes themselves
        assert multiplied[0].data_ptr() == a.codes.data_ptr()
        assert multiplied[1].data_ptr() == b.codes.data_ptr()
        return
    for got, one in zip(multiplied, (a, b), strict=True):
        exact = one.codes.double() * expand_blocks(one.scale_inv, one.block, one.codes.shape).double()
        assert torch.equal(got, exact.float()), "codes times scales, rounded to float32 once"
        assert not torch.equal(got.bfloat16().float(), got), "bfloat16 would round them again"
