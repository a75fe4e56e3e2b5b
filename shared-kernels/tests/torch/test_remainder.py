"""torch's float32 from codes and lower bytes equals NumPy's, and both give back what was split."""

import numpy as np
import pytest
import torch

from fp8_common import DATA_FORMATS, Fp8Error, get_format
from fp8_common import quantize as quantize_numpy
from fp8_common._remainder import join_lower_bytes, lower_bytes, not_joined
from fp8_common.testing import all_bfloat16, assert_same_bits
from fp8_common.torch import _remainder_compiled as compiled_functions
from fp8_common.torch.plugin import dispatch

FORMATS = [fmt.name for fmt in DATA_FORMATS]


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    ordinary = (rng.standard_normal(40_000) * 2.0 ** rng.integers(-12, 12, 40_000)).astype(np.float32)
    return np.concatenate([all_bfloat16().astype(np.float32), ordinary])


@pytest.mark.matrix(fmt=FORMATS, scale=[1.0, 0.37, 4.4e3, 2.0**-126, 2.0**100, 0.0, float("nan"), 3e38])
def test_same_numbers_as_numpy_makes(fmt, scale):
    x, one = numbers(), np.float32(scale)
    codes = quantize_numpy(x, one, fmt)
    ours, given = torch.from_numpy(x), torch.tensor(one)
    lower = dispatch.lower_bytes(ours)
    assert_same_bits(lower.numpy(), lower_bytes(x))
    joined = dispatch.join_lower_bytes(torch.from_numpy(codes), given, lower, get_format(fmt))
    assert_same_bits(joined.numpy(), join_lower_bytes(codes, one, lower_bytes(x), fmt))
    places = dispatch.not_joined(ours, torch.from_numpy(codes), given, get_format(fmt))
    assert_same_bits(places.numpy(), np.flatnonzero(not_joined(x, codes, one, fmt)))


@pytest.mark.matrix(fmt=FORMATS)
def test_same_numbers_with_a_scale_for_each_row(fmt):
    x = numbers()[:65_536].reshape(256, 256)
    scale = np.random.default_rng(1).integers(60 << 23, 200 << 23, (256, 1), dtype=np.int32).view(np.float32)
    codes = quantize_numpy(x, scale, fmt)
    arguments = torch.from_numpy(codes), torch.from_numpy(scale)
    joined = dispatch.join_lower_bytes(*arguments, dispatch.lower_bytes(torch.from_numpy(x)), get_format(fmt))
    assert_same_bits(joined.numpy(), join_lower_bytes(codes, scale, lower_bytes(x), fmt))
    places = dispatch.not_joined(torch.from_numpy(x), *arguments, get_format(fmt))
    assert_same_bits(places.numpy(), np.flatnonzero(not_joined(x, codes, scale, fmt)))


def test_all_four_bytes_need_no_code():
    x = torch.from_numpy(numbers())
    again = dispatch.join_bytes(dispatch.top_byte(x), dispatch.lower_bytes(x))
    assert_same_bits(again.numpy(), x.numpy())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_compiled_functions_make_the_same_bits(fmt):
    """One scale and a scale for each row; where more than the list is to hold what is not joined, the cast says so."""
    compiled, fmt = dispatch.compiled_bytes(get_format(fmt)), get_format(fmt)
    x = torch.from_numpy(numbers()[: 400 * 256]).view(400, 256)
    for scale in (torch.tensor(0.37), torch.logspace(-3, 4, 400).view(-1, 1)):
        lower, top = torch.empty((3, *x.shape), dtype=torch.uint8), torch.empty(x.shape, dtype=torch.uint8)
        compiled.split(x, lower, top)
        assert torch.equal(lower, dispatch.lower_bytes(x))
        assert torch.equal(top, dispatch.top_byte(x))
        inverse = dispatch.usable_inverse(scale)
        assert compiled.cast(top, scale, inverse, lower) < 0, "tiny and huge numbers are among them"
        assert torch.equal(top, dispatch.quantize(x, scale, fmt).view(torch.uint8))
        joined = dispatch.join_scaled(top, inverse, lower, fmt)
        assert_same_bits(compiled.join(top, inverse, lower).numpy(), joined.numpy())
    values = torch.linspace(0.1, 100, 400 * 256).view(400, 256)
    compiled.split(values, lower, top)
    one = torch.tensor(1.0)
    assert compiled.cast(top, one, one, lower) >= 0
    assert torch.equal(dispatch.join_scaled(top, one, lower, fmt), values)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [2.0**-11, -(2.0**-11), 1.1e-5, -1e-30, 2000.0, -1e9, torch.inf, torch.nan])
def test_compiled_casts_tell_of_one_number_that_the_bytes_do_not_give_back(number):
    """2^-11 has the lower bytes of an exact zero beside the code 0, half of whose range begins at 2^-10."""
    x, one = torch.linspace(0.1, 100, 259), torch.tensor(1.0)
    x[7] = 0.0
    for place in (None, 3, 258):
        if place is not None:
            x[place] = number
        lower, top = dispatch.lower_bytes(x), dispatch.top_byte(x)
        may_fail = dispatch.compiled_bytes(get_format("e4m3")).cast(top, one, one, lower)
        assert (may_fail < 0) == (place is not None)
        assert torch.equal(top, dispatch.quantize(x, one, get_format("e4m3")).view(torch.uint8))
        x[place or 0] = 1.0


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with pytest.raises(Fp8Error, match="compiled=True knows e4m3 and e5m2, got e4m3fnuz"):
        compiled_functions.CompiledBytes(get_format("e4m3fnuz"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    compiled_functions.CompiledBytes(get_format("e4m3"))
    monkeypatch.setattr(compiled_functions, "LOWER_BYTES", 0xFFFFFE)
    with pytest.raises(Fp8Error, match="makes other bits than the references"):
        compiled_functions.CompiledBytes(get_format("e4m3"))

    def missing(*arguments):
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(torch, "compile", lambda function, **_: missing)
    with pytest.raises(Fp8Error, match=r"needs what torch.compile needs, and it failed: no C\+\+ compiler\.$"):
        compiled_functions.CompiledBytes(get_format("e4m3"))


@pytest.mark.timeout(1800)
def test_random_numbers_come_back(full):
    """10^6 random float32 bit patterns by default, 10^8 under --full; many of them finite and far from any scale."""
    generator = torch.Generator().manual_seed(0)
    for index in range(400 if full else 4):
        fmt = get_format(FORMATS[index % 4])
        bits = torch.randint(-(1 << 31), 1 << 31, (250_000,), generator=generator).int()
        # half of them within what the scale is made for
        if index % 2:
            bits = (bits & -0x70000001) | 0x38000000
        x = bits.view(torch.float32)
        scale = torch.rand((), generator=generator) * 4 + 1e-3
        codes = dispatch.quantize(x, scale, fmt).view(torch.uint8)
        back = dispatch.join_lower_bytes(codes, scale, dispatch.lower_bytes(x), fmt)
        places = dispatch.not_joined(x, codes, scale, fmt)
        back[places] = x[places]
        assert torch.equal(back.view(torch.int32), bits)
