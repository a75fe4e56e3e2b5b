"""`assert_same_bits`: bit-for-bit comparison in which NaN equals NaN.

Libraries differ in the bits of NaN, so all NaN are equal. All other values are compared by their bits: -0 differs from
0. A distance counts representable values (ULP), where -0 and 0 are neighbors. Tensors are converted to arrays of the
same bits without importing their library.
"""

import sys
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp8_common._reference.rounding import decode
from fp8_common.errors import Fp8Error
from fp8_common.formats import FORMATS, Format, get_format
from fp8_common.text_table import aligned

SHOWN = 8
"""Maximum number of differing values in a failure's message."""

_FLOATS = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
_NAN_DISTANCE = np.uint64(2**64 - 1)
_SAME_BITS = {fmt.dtype_name: ("uint8", fmt.numpy_dtype) for fmt in FORMATS.values()} | {
    "bfloat16": ("uint16", np.dtype(ml_dtypes.bfloat16))
}


def assert_same_bits(
    got: Any,
    want: Any,
    *,
    fmt: str | Format | None = None,
    source: Any = None,
    seed: Any = None,
    max_ulp: int = 0,
    name: str = "got",
) -> None:
    """Raise unless `got` equals `want` bit for bit.

    NaN equals NaN, regardless of bits.

    Args:
        got: Result: array or tensor of any float8, float, integer or boolean dtype, or uint8 codes.
        want: Expected result of the same shape and dtype.
        fmt: Format of FP8 codes. With it, uint8 codes may be compared to the format's own dtype. Without it, uint8 is
            compared as integers.
        source: Inputs of the cast, of the same shape, to show next to the differences.
        seed: Value that reproduces the inputs, to show in the message.
        max_ulp: Largest accepted distance in representable values. Use 0 unless orders of accumulation differ.
        name: Name of the result, the first word of the message.

    Raises:
        AssertionError: If shapes, dtypes or values differ. The message has their number, a histogram of distances, the
            first differing values with index, source, value and bits, and the seed.
        Fp8Error: If `max_ulp` is negative, `fmt` is unknown, or `source` has another shape.
    """
    if max_ulp < 0:
        raise Fp8Error(f"max_ulp must be 0 or more, got {max_ulp!r}.")
    got_array, want_array, form = _comparable(as_numpy(got), as_numpy(want), fmt, name)
    distance = _distance(got_array, want_array, form)
    bad = distance > np.uint64(max_ulp)
    if not bad.any():
        return
    lines = [
        f"{name}: {bad.sum()} of {bad.size} values ({100 * bad.mean():.3g} %) differ by more than {max_ulp} ULP",
        f"  ULP histogram: {_histogram(distance[bad])}",
        *_table(got_array, want_array, distance, bad, _checked_source(source, bad.shape), form),
    ]
    if seed is not None:
        lines.append(f"  seed: {seed!r}")
    raise AssertionError("\n".join(lines))


def as_numpy(x: Any) -> NDArray[Any]:
    """Convert an array or tensor to NumPy, in the same dtype.

    Accepts all arguments of `numpy.asarray`, and torch tensors on any device, including those that require gradients.
    Dtypes that NumPy does not have (float8, bfloat16) become the ml_dtypes dtype with the same bits.
    """
    if not hasattr(x, "detach"):
        return np.asarray(x)
    tensor = x.detach().cpu()
    # The dtype's name has the library ("torch.float8_e4m3fn"), which the code that created the tensor has imported.
    library, _, name = str(tensor.dtype).rpartition(".")
    if name not in _SAME_BITS:
        return tensor.numpy()
    # NumPy does not support these dtypes of torch, so the bits are passed as unsigned integers.
    carrier, dtype = _SAME_BITS[name]
    return tensor.contiguous().view(getattr(sys.modules[library], carrier)).numpy().view(dtype)


def _comparable(
    got: NDArray[Any], want: NDArray[Any], fmt: str | Format | None, name: str
) -> tuple[NDArray[Any], NDArray[Any], Format | None]:
    """Return both arrays in the same dtype, and their FP8 format.

    FP8 codes become uint8; the format of other dtypes is None. Raises AssertionError if shapes or dtypes differ.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, but {want.shape} was expected")
    form = get_format(fmt) if fmt is not None else _format_of(want.dtype)
    if form is None:
        if got.dtype != want.dtype:
            hint = ". Pass fmt to compare codes with float8" if np.uint8 in (got.dtype, want.dtype) else ""
            raise AssertionError(f"{name}: dtype {got.dtype}, but {want.dtype} was expected{hint}")
        return got, want, None
    allowed = (np.dtype(np.uint8), form.numpy_dtype) if fmt is not None else (form.numpy_dtype,)
    for side, array in (("", got), (" (the expected side)", want)):
        if array.dtype not in allowed:
            raise AssertionError(
                f"{name}{side}: dtype {array.dtype}, but {' or '.join(map(str, allowed))} was expected"
            )
    return got.view(np.uint8), want.view(np.uint8), form


def _format_of(dtype: np.dtype[Any]) -> Format | None:
    return next((fmt for fmt in FORMATS.values() if fmt.numpy_dtype == dtype), None)


def _distance(got: NDArray[Any], want: NDArray[Any], fmt: Format | None) -> NDArray[np.uint64]:
    """Return distances in representable values, as uint64.

    The distance is 0 if both values are NaN, and `_NAN_DISTANCE` if only one is.
    """
    a, b = _ordinal(got, fmt), _ordinal(want, fmt)
    # Unsigned subtraction wraps around, so the difference is right even if int64 would overflow.
    distance = np.where(a > b, a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64))
    got_nan, want_nan = _is_nan(got, fmt), _is_nan(want, fmt)
    distance = np.where(got_nan & want_nan, np.uint64(0), distance)
    return np.where(got_nan ^ want_nan, _NAN_DISTANCE, distance)


def _ordinal(x: NDArray[Any], fmt: Format | None) -> NDArray[np.int64]:
    """Return the number of each value in the order of representable values.

    0 is 0, 1 the smallest positive value, -1 is -0, -2 the largest negative value.
    """
    if fmt is None and x.dtype not in _FLOATS:
        return np.asarray(x.astype(np.int64))
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    # The codes of E8M0 are in order.
    if fmt is not None and not fmt.signed:
        return np.asarray(bits & 0xFF)
    # Floats are sign and magnitude; ~magnitude counts down from -1, so that -0 and 0 are neighbors.
    magnitude = bits & np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1)
    return np.asarray(np.where(bits < 0, ~magnitude, magnitude))


def _is_nan(x: NDArray[Any], fmt: Format | None) -> NDArray[np.bool_]:
    if fmt is None and x.dtype not in _FLOATS:
        return np.zeros(x.shape, bool)
    return np.asarray(np.isnan(x if fmt is None else decode(x, fmt)))


def _histogram(distance: NDArray[np.uint64]) -> str:
    """Return the numbers of distances in doubling ranges as text.

    For example "1: 12, 2: 3, 3-4: 1, NaN on one side: 2".
    """
    nan = distance == _NAN_DISTANCE
    steps = [int(step) for step in distance[~nan]]
    bins: dict[int, int] = {}
    for step in steps:
        power = (step - 1).bit_length()  # 1: 0, 2: 1, 3-4: 2, 5-8: 3 ...
        bins[power] = bins.get(power, 0) + 1
    ranges = ((2**power // 2 + 1, 2**power, bins[power]) for power in sorted(bins))
    parts = [f"{last if first >= last else f'{first}-{last}'}: {count}" for first, last, count in ranges]
    return ", ".join(parts + ([f"NaN on one side: {nan.sum()}"] if nan.any() else []))


def _checked_source(source: Any, shape: tuple[int, ...]) -> NDArray[Any] | None:
    if source is None:
        return None
    array = as_numpy(source)
    if array.shape != shape:
        raise Fp8Error(f"source must have the shape {shape} of the compared arrays, got {array.shape}.")
    return array


def _table(
    got: NDArray[Any],
    want: NDArray[Any],
    distance: NDArray[np.uint64],
    bad: NDArray[np.bool_],
    source: NDArray[Any] | None,
    fmt: Format | None,
) -> Iterable[str]:
    """Return lines of a table: headings, and the first differing values."""
    rows = [("index", "source", "got", "expected", "ULP")]
    for where in np.argwhere(bad)[:SHOWN]:
        index = tuple(int(i) for i in where)
        ulp = "NaN" if distance[index] == _NAN_DISTANCE else str(distance[index])
        origin = "-" if source is None else _show(source[index], None)
        rows.append((str(index), origin, _show(got[index], fmt), _show(want[index], fmt), ulp))
    return aligned(rows, indent="  ")


def _show(item: Any, fmt: Format | None) -> str:
    """Return the value and the bits of one element as text."""
    scalar = np.asarray(item)
    if fmt is not None:
        return f"{float(decode(scalar, fmt)):.9g} (0x{int(scalar):02x})"
    if scalar.dtype not in _FLOATS:
        form = _format_of(scalar.dtype)
        return str(scalar) if form is None else _show(scalar.view(np.uint8), form)
    size = scalar.dtype.itemsize
    bits = int(scalar.view(f"u{size}"))
    return f"{float(scalar):.{17 if size == 8 else 9}g} (0x{bits:0{2 * size}x})"
