"""The five formats: fields, limits, names."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import E4M3, E5M2, E8M0, Fp8Error
from fp8_common.formats import DATA_FORMATS, E4M3FNUZ, E5M2FNUZ, FORMATS, get_data_format, get_format

# bias, bits of exponent and mantissa; has infinity, is FNUZ, has a sign
FACTS = {
    "e4m3": (7, 4, 3, False, False, True),
    "e5m2": (15, 5, 2, True, False, True),
    "e4m3fnuz": (8, 4, 3, False, True, True),
    "e5m2fnuz": (16, 5, 2, False, True, True),
    "e8m0": (127, 8, 0, False, False, False),
}


@pytest.mark.parametrize("name", FACTS)
def test_fields_and_limits_equal_ml_dtypes(name):
    fmt = get_format(name)
    fields = (fmt.bias, fmt.exponent_bits, fmt.mantissa_bits, fmt.has_infinity, fmt.fnuz, fmt.signed)
    assert fields == FACTS[name]
    info = ml_dtypes.finfo(fmt.numpy_dtype)
    assert (fmt.max, fmt.smallest_normal) == (float(info.max), float(info.smallest_normal))
    assert fmt.max_exponent == int(np.floor(np.log2(float(info.max))))
    assert fmt.smallest_subnormal == float(np.uint8(fmt.signed).view(fmt.numpy_dtype))
    assert get_format(fmt.name) is get_format(fmt.dtype_name) is get_format(fmt) is fmt
    assert (str(fmt), fmt.dtype_name) == (name, fmt.numpy_dtype.name)


def test_every_format_is_listed():
    assert (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ) == DATA_FORMATS
    assert (*DATA_FORMATS, E8M0) == tuple(FORMATS.values())


def test_unknown_names_and_scales_for_data_raise():
    with pytest.raises(Fp8Error, match=r"Unknown FP8 format 'e3m4'\. Use one of e4m3, e5m2"):
        get_format("e3m4")
    with pytest.raises(Fp8Error, match="E8M0 holds block scales, not data"):
        get_data_format(E8M0)
