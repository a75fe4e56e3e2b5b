"""assert_same_bits: what counts as equal, and what a failure reports."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import Fp8Error
from fp8_common.formats import FORMATS
from fp8_common.numerics import encode
from fp8_common.testing import all_codes, assert_same_bits


def failure(got, want, **settings):
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(got, want, **settings)
    return str(caught.value)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_code_equals_itself_in_any_dress_and_another_only_where_both_are_nan(fmt):
    codes = all_codes(fmt)
    assert_same_bits(codes.view(fmt.numpy_dtype), codes, fmt=fmt.name)
    assert_same_bits(codes.view(fmt.numpy_dtype), codes.view(fmt.numpy_dtype))
    a, b = np.meshgrid(codes, codes)
    nan = np.isnan(a.view(fmt.numpy_dtype).astype(np.float32)) & np.isnan(b.view(fmt.numpy_dtype).astype(np.float32))
    wrong = int(((a != b) & ~nan).sum())
    assert f"{wrong} of 65536 values" in failure(a, b, fmt=fmt)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floats_are_compared_by_bits_and_nan_as_a_class(dtype):
    info = ml_dtypes.finfo(dtype)
    x = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, float(info.tiny) / 2], dtype)
    assert_same_bits(x, x.copy())
    assert_same_bits(np.array([np.nan], dtype), -np.array([np.nan], dtype))
    assert "1: 1" in failure(x[:1], x[1:2])
    assert "1: 1" in failure(np.nextafter(x[2:3], x[3:4]), x[2:3])
    assert "NaN on one side: 1" in failure(x[3:4], x[5:6])


def test_distances_count_values_across_zero_and_up_to_max_ulp_are_accepted():
    smallest = np.uint32([1, 0x80000001]).view(np.float32)
    assert "3-4: 1" in failure(smallest[:1], smallest[1:])
    got, want = np.uint8([0x38, 0x3A]), np.uint8([0x39, 0x39])
    assert_same_bits(got, want, fmt="e4m3", max_ulp=1)
    got[1] += 1
    assert "1 of 2 values (50 %) differ by more than 1 ULP" in failure(got, want, fmt="e4m3", max_ulp=1)
    assert "NaN on one side" in failure(np.uint8([0x7F]), np.uint8([0x7E]), fmt="e4m3", max_ulp=200)


def test_the_failure_names_count_histogram_offenders_and_seed():
    source = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32) * 20
    want = encode(source, "e4m3")
    got = want.copy()
    got[2, 5:8] += 1
    got[7, :9] -= 8
    lines = failure(got, want, fmt="e4m3", source=source, seed=1234, name="triton.cast").splitlines()
    assert lines[0] == "triton.cast: 12 of 1024 values (1.17 %) differ by more than 0 ULP"
    assert lines[1] == "  ULP histogram: 1: 3, 5-8: 9"
    assert lines[2].split() == ["index", "source", "got", "expected", "ULP"]
    value = source[2, 5]
    assert lines[3].split(maxsplit=4)[:4] == ["(2,", "5)", f"{value:.9g}", f"(0x{int(value.view(np.uint32)):08x})"]
    assert f"(0x{got[2, 5]:02x})" in lines[3]
    assert f"(0x{want[2, 5]:02x})" in lines[3]
    assert lines[-1] == "  seed: 1234"
    assert len(lines) == 4 + 8, "the first offenders are listed"


CODES = np.zeros(1, ml_dtypes.float8_e5m2)


@pytest.mark.parametrize(
    ("got", "want", "fmt", "message"),
    [
        (np.zeros(3), np.zeros((3, 1)), None, r"got: shape (3,), but (3, 1) was expected"),
        (np.zeros(1), np.zeros(1, np.float32), None, "got: dtype float64, but float32 was expected"),
        (np.zeros(1, np.uint8), CODES, None, "but float8_e5m2 was expected"),
        (CODES, np.zeros(1, np.uint8), None, "Pass fmt to compare codes with float8"),
        (CODES, CODES.view(ml_dtypes.float8_e4m3fn), None, "dtype float8_e5m2"),
        (CODES, np.zeros(1, np.uint8), "e4m3", "but uint8 or float8_e4m3fn was expected"),
        (np.zeros(1, np.uint8), np.zeros(1, np.int32), "e4m3", "got (the expected side): dtype int32"),
        # integers and booleans are compared exactly
        (np.int64([2]), np.int64([-2]), None, "3-4: 1"),
        (np.uint8([127]), np.uint8([255]), None, "127"),
        (np.array([True]), np.array([False]), None, "differ"),
        (np.uint8([0]), np.uint8([0x80]), "e4m3", "1: 1"),
        (np.float32(1), np.float32(2), None, "()"),
    ],
)
def test_differences_are_listed(got, want, fmt, message):
    assert message in failure(got, want, fmt=fmt)


def test_empty_strided_and_listed_inputs():
    assert_same_bits(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert_same_bits(x.T[::2], np.ascontiguousarray(x.T[::2]))
    assert_same_bits([1.0, 2.0], np.float64([1, 2]))
    source = np.uint8([0x38]).view(ml_dtypes.float8_e4m3fn)
    assert "1 (0x38)" in failure(np.float32([1]), np.float32([2]), source=source), "a source may be of any dtype"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_ulp": -1}, "max_ulp must be 0 or more, got -1"),
        ({"source": np.zeros(3)}, r"source must have the shape \(2,\) of the compared arrays, got \(3,\)"),
        ({"fmt": "fp4"}, "Unknown FP8 format"),
    ],
)
def test_senseless_arguments_raise(settings, message):
    with pytest.raises(Fp8Error, match=message):
        assert_same_bits(np.zeros(2), np.ones(2), **settings)
