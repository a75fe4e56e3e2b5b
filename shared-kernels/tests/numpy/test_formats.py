"""The five formats: fields, limits, names."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import DATA_FORMATS, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, Fp8Error, get_format
from fp8_common.formats import get_data_format

FACTS = {
    "e4m3": (7, 4, 3, 448.0, 2.0**-6, 2.0**-9),
    "e5m2": (15, 5, 2, 57344.0, 2.0**-14, 2.0**-16),
    "e4m3fnuz": (8, 4, 3, 240.0, 2.0**-7, 2.0**-10),
    "e5m2fnuz": (16, 5, 2, 57344.0, 2.0**-15, 2.0**-17),
    "e8m0": (127, 8, 0, 2.0**127, 2.0**-127, 2.0**-127),
}


@pytest.mark.parametrize("name", FACTS)
def test_fields_and_limits(name):
    fmt = get_format(name)
    found = (fmt.bias, fmt.exponent_bits, fmt.mantissa_bits, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal)
    assert found == FACTS[name]
    assert str(fmt) == name


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_limits_equal_those_of_ml_dtypes(fmt):
    info = ml_dtypes.finfo(fmt.numpy_dtype)
    assert (fmt.max, fmt.smallest_normal) == (float(info.max), float(info.smallest_normal))
    assert fmt.dtype_name == fmt.numpy_dtype.name
    assert fmt.max_exponent == int(np.floor(np.log2(float(info.max))))


@pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
def test_smallest_subnormal_is_code_one(fmt):
    assert fmt.smallest_subnormal == float(np.uint8(1).view(fmt.numpy_dtype))
    assert fmt.smallest_subnormal == float(ml_dtypes.finfo(fmt.numpy_dtype).smallest_subnormal)


def test_only_e5m2_has_infinity_and_only_fnuz_lack_negative_zero():
    assert [fmt.name for fmt in FORMATS.values() if fmt.has_infinity] == ["e5m2"]
    assert [fmt.name for fmt in FORMATS.values() if fmt.fnuz] == ["e4m3fnuz", "e5m2fnuz"]
    assert [fmt.name for fmt in FORMATS.values() if not fmt.signed] == ["e8m0"]


def test_names_dtype_names_and_formats_are_all_found():
    for fmt in FORMATS.values():
        assert get_format(fmt.name) is get_format(fmt.dtype_name) is get_format(fmt) is fmt
    assert (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ) == DATA_FORMATS


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(Fp8Error, match=r"Unknown FP8 format 'e3m4'\. Use one of e4m3, e5m2"):
        get_format("e3m4")


def test_e8m0_is_refused_for_data():
    with pytest.raises(Fp8Error, match="E8M0 holds block scales, not data"):
        get_data_format(E8M0)
