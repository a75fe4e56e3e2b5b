"""Kernels of amax and casts equal the NumPy definition bit for bit: input dtypes, formats, shapes, special values."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common.policy import MX_MODES
from fp8_common.testing import adversarial_amax, all_bfloat16, all_float16, assert_same_bits
from fp8_common.testing.compare import as_numpy
from fp8_common.torch import casts, decoding
from fp8_common.torch._triton import launch, name_of, plans
from kernel_inputs import DTYPES, FORMATS, SHAPES, calm, every_input, number, planted, tensor
from tests.helpers.tensors import same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 4095, 4096, 9999])
def test_amax_keeps_a_nan_wherever_it_is(dtype, where):
    x = np.ones(10000, DTYPES[dtype])
    x[5], x[where] = np.inf, np.nan
    assert np.isnan(casts.amax(tensor(x)).item())


@pytest.mark.parametrize("both", [False, True])
@every_input
def test_a_given_scale_one_way_and_both_and_the_amax(dtype, fmt, shape, both):
    x, scale, form = planted(shape, dtype, fmt), np.float32(0.37), f8.formats.get_format(fmt)
    want = f8.quantize(x, scale, fmt)
    cast = casts.quantize_both_with_amax if both else casts.quantize_with_amax
    got, amax, *transposed = cast(tensor(x), number(scale), form)
    assert_same_bits(amax, f8.amax(x))
    assert_same_bits(casts.amax(tensor(x)), f8.amax(x))
    for codes in (got, casts.quantize(tensor(x), number(scale), form)):
        assert_same_bits(codes, want, fmt=fmt, source=x)
    if both:
        assert_same_bits(transposed[0], want.T, fmt=fmt, source=x.T)


@every_input
def test_dynamic_casts_one_way_and_both_and_the_scale_back(dtype, fmt, shape):
    form = f8.formats.get_format(fmt)
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        want = f8.amax_to_scale(f8.amax(x), fmt) if x.size else np.float32(1)
        codes = f8.quantize(x, want, fmt)
        one, both = (casts.quantize_dynamic(tensor(x), form, f8.CANONICAL, both=both) for both in (False, True))
        by_amax = casts.quantize_transposed(tensor(x), number(f8.amax(x)), form, f8.CANONICAL)
        assert_same_bits(one.scale, want)
        assert_same_bits(one.codes, codes, fmt=fmt, source=x)
        for got, transposed, *scales in (both.codes, both.transposed.codes, both.scale, both.scale_inv), by_amax:
            assert_same_bits(scales[0], want)
            assert_same_bits(scales[1], f8.numerics.reciprocal(want))
            assert_same_bits(got, codes, fmt=fmt, source=x)
            assert_same_bits(transposed, codes.T, fmt=fmt, source=x.T)


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)])
@pytest.mark.parametrize("columns", [517, 17000])
def test_scales_back_of_rows_and_blocks(block, columns):
    x = calm((130, columns) if block else (3, columns), "bfloat16")
    made = casts.quantize_dynamic(tensor(x), f8.E4M3, f8.CANONICAL, block or (1, 0))
    assert_same_bits(made.scale_inv, f8.numerics.reciprocal(as_numpy(made.scale)))


ROWS = [*SHAPES, (3, 16384), (3, 20001), (4, 7)]  # long rows have a kernel of their own


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=ROWS, folded=[False, True], both=[False, True])
def test_rows_folded_or_not_and_columns_from_two_reads(dtype, fmt, shape, folded, both):
    fold = np.exp2(np.random.default_rng(1).uniform(-9, 9, shape[1])).astype(np.float32) if folded else None
    both = both and shape in ((300, 517), (128, 160), (4, 7))  # the kernel of both takes rows by fours
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        folds = tensor(fold) if folded else None
        made = casts.quantize_dynamic(
            tensor(x), f8.formats.get_format(fmt), f8.CANONICAL, (1, 0), fold=folds, both=both
        )
        with np.errstate(all="ignore"):
            rows = x.astype(np.float32) * fold if folded else x
        columns = [(made.transposed, np.ascontiguousarray(x.T))] if both else []
        for got, source in [(made, rows), *columns]:
            want = f8.quantize_rowwise(source, fmt)
            if not both:  # nobody casts again with scales of both
                assert_same_bits(got.scale, want.scale)
            assert_same_bits(got.scale_inv, f8.numerics.reciprocal(want.scale))
            assert_same_bits(got.codes, want.data, fmt=fmt, source=source)


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES, rows=[1, 128])
def test_blocks_and_the_way_back(dtype, fmt, shape, rows):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        form, block = f8.formats.get_format(fmt), (rows, 128)
        made = casts.quantize_dynamic(tensor(x), form, f8.CANONICAL, block)
        got = made.codes, made.scale
        want = f8.quantize_blockwise(x, fmt, block)
        assert_same_bits(got[1], want.scale)
        assert_same_bits(got[0], want.data, fmt=fmt, source=x)
        back = decoding.dequantize(made.codes, made.scale_inv, form, getattr(torch, dtype), block)
        assert_same_bits(back, f8.dequantize_blockwise(*want, fmt, block, DTYPES[dtype]))


def assert_mx(x, fmt, mode):
    """Compare data and codes of scales with the definition, and return both."""
    made, want = casts.quantize_mx(tensor(x), f8.formats.get_format(fmt), mode), f8.quantize_mx(x, fmt, mode)
    assert_same_bits(made[1], want.scale, fmt="e8m0")
    assert_same_bits(made[0], want.data, fmt=fmt, source=x)
    return made, want


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES, mode=MX_MODES)
def test_mx_and_the_way_back(dtype, fmt, shape, mode):
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        (data, codes), want = assert_mx(x, fmt, mode)
        back = decoding.dequantize_mx(data, codes, f8.formats.get_format(fmt), getattr(torch, dtype))
        assert_same_bits(back, f8.dequantize_mx(*want, fmt, DTYPES[dtype]))


@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_mx_codes_of_every_kind_of_amax(fmt, mode):
    assert_mx(np.repeat(adversarial_amax(), 32).reshape(-1, 32), fmt, mode)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("x", [all_bfloat16(), all_float16()], ids=["bfloat16", "float16"])
def test_every_16_bit_value_there_and_every_code_back(fmt, x):
    got = casts.quantize(tensor(x), number(1.0), f8.formats.get_format(fmt))
    assert_same_bits(got, f8.quantize(x, np.float32(1), fmt), fmt=fmt, source=x)
    codes = np.arange(256, dtype=np.uint8)
    back = decoding.dequantize(tensor(codes), casts.reciprocal(number(3.0)), f8.formats.get_format(fmt), torch.float32)
    assert_same_bits(back, f8.dequantize(codes, np.float32(3), fmt))


@pytest.mark.parametrize("square", [False, True])
@every_input
def test_blocks_both_ways_are_two_casts_of_one_read(dtype, fmt, shape, square):
    form, block = f8.formats.get_format(fmt), (128 if square else 1, 128)
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        if x.ndim != 2 or x.shape[0] % 4 or not x.size:
            continue
        made = casts.quantize_dynamic(tensor(x), form, f8.CANONICAL, block, both=True)
        assert made.transposed is not None
        for got, own in ((made, x), (made.transposed, np.ascontiguousarray(x.T))):
            want = f8.quantize_blockwise(own, fmt, block)
            assert_same_bits(got.codes, want.data, fmt=fmt, source=own)
            assert_same_bits(got.scale_inv, f8.numerics.reciprocal(want.scale))
            # as cuBLAS reads them
            assert (got.scale_inv if square else got.scale_inv.t()).is_contiguous()


@pytest.mark.parametrize("count", [1, 3])
@every_input
def test_rows_and_the_same_codes_transposed(dtype, fmt, shape, count):
    form = f8.formats.get_format(fmt)
    for one in (planted(shape, dtype, fmt), calm(shape, dtype)):
        x = (
            one
            if count == 1
            else np.stack([one, *(calm(shape, dtype) * 2.0**i for i in range(1, count))]).astype(one.dtype)
        )
        made = casts.quantize_turned_rows(tensor(x), form, f8.CANONICAL)
        want = f8.quantize_rowwise(x, fmt)
        assert (made.transposed is None) == bool(shape[0] % 4 or not x.size)
        assert_same_bits(made.codes, want.data, fmt=fmt, source=x)
        assert_same_bits(made.scale_inv, f8.numerics.reciprocal(want.scale))
        if made.transposed is not None:
            turned, codes, scale = (np.ascontiguousarray(np.swapaxes(y, -1, -2)) for y in (x, want.data, want.scale))
            assert_same_bits(made.transposed.codes, codes, fmt=fmt, source=turned)
            assert_same_bits(made.transposed.scale_inv, f8.numerics.reciprocal(scale))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(300, 517), (128, 160), (6, 256), (1, 7)])
def test_float32_is_read_as_bfloat16_on_request(fmt, shape):
    wide = tensor(planted(shape, "float32", fmt))
    scale = number(0.37).reshape(1)
    both = {"rounded": wide, "bfloat16": wide.to(torch.bfloat16)}
    launches = {
        "amax": (lambda name, **how: plans().amax(wide.numel(), name, **how), {}),
        "cast": (
            lambda name, **how: plans().cast(wide.numel(), name, fmt, with_amax=True, **how),
            {"scale_ptr": scale},
        ),
        "both ways": (
            lambda name, **how: plans().cast_transpose(*shape, name, fmt, with_amax=True, **how),
            {"scale_ptr": scale},
        ),
    }
    for kind, (make, given) in launches.items():
        found, wanted = (
            launch(make(name_of(x.dtype), rounded=kind == "rounded"), x.device, x_ptr=x, **given)
            for kind, x in both.items()
        )
        # conversions to bfloat16 do not agree about the sign of NaN
        for one, other in zip(found, wanted, strict=True):
            values = [y.view(torch.float32) if y.dtype == torch.int32 else y.float() for y in (one, other)]
            assert torch.equal(values[0].isnan(), values[1].isnan())
            assert same(*(y.nan_to_num(0.0) for y in values)), kind
