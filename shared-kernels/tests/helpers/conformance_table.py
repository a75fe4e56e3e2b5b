"""The calls that are compared: one row for each operation and granularity, with its inputs.

A call is written once, with the names that NumPy, torch and JAX share; the implementations differ in their arrays only.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance_implementations import Implementation, NotDefinedError
from conformance_inputs import (
    DTYPES,
    NONFINITE_SCALES,
    SCALES,
    any_bits,
    array,
    combinations,
    count,
    count_amax,
    generator,
    numpy_dtype,
    policies,
    shapes,
    values,
)
from fp8_common import CANONICAL, E8M0, Format
from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.formats import DATA_FORMATS
from fp8_common.policy import HISTORY_ALGOS, MX_MODES
from fp8_common.presets import PRESETS
from fp8_common.testing import adversarial_amax, all_codes


class Call:
    """One call of an operation.

    Args:
        function: The name of an operation, or a function of an implementation and the arguments.
        arguments: Arrays and options in the order of the call; the name of a dtype stands for the implementation's.
        formats: The FP8 format of each result, None for floats.
    """

    def __init__(self, function: Any, *arguments: Any, formats: tuple[Format | None, ...] = (None,)) -> None:
        self.function, self.arguments, self.formats = function, arguments, formats
        self.arrays: tuple[NDArray[Any], ...] = tuple(one for one in arguments if isinstance(one, np.ndarray))

    def __str__(self) -> str:
        shown = (f"{one.dtype}{one.shape}" if isinstance(one, np.ndarray) else str(one) for one in self.arguments)
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(shown)})"

    def bound(self, lib: Implementation) -> Callable[..., Any]:
        """Return a function of an implementation's arrays; it returns None for what is not defined."""
        named = isinstance(self.function, str)
        function = getattr(lib.f8, self.function, _undefined) if named else partial(self.function, lib)
        options = [lib.dtype(one) if isinstance(one, str) and one in DTYPES else one for one in self.arguments]
        places = [place for place, one in enumerate(options) if isinstance(one, np.ndarray)]

        def run(*arrays: Any) -> Any:
            arguments = list(options)
            for place, one in zip(places, arrays, strict=True):
                arguments[place] = one
            with contextlib.suppress(NotDefinedError):
                return function(*arguments)

        return run


def _undefined(*_: Any) -> None:
    raise NotDefinedError


Row = Callable[[bool], Iterator[Call]]
ROWS: dict[str, Row] = {}
"""The table: each row's calls, as a function of whether the whole matrix was asked for."""


def row(name: str, *options: Any) -> Callable[[Callable[..., Iterator[Call]]], Any]:
    """Put a function into the table, with the options that come after `full`."""

    def add(function: Callable[..., Iterator[Call]]) -> Any:
        ROWS[name] = lambda full: function(full, *options)
        return function

    return add


def random_bits(shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Return random bits for stochastic rounding; the smallest and largest values are among them."""
    bits = generator("bits", shape).integers(0, 2**32, shape, np.uint32)
    bits.reshape(-1)[::5], bits.reshape(-1)[1::5] = 0, 2**32 - 1
    return bits


def amaxes(full: bool) -> NDArray[np.float32]:
    """Return amax of every kind."""
    return np.concatenate([adversarial_amax(), np.abs(any_bits(np.float32, count_amax(full)))])


EXTREME = np.concatenate([SCALES, NONFINITE_SCALES])[:, None]


def reaching(fmt: Format, dtype: np.dtype) -> NDArray[np.generic]:
    """Return a row for each extreme scale: values that it brings near the range of `fmt`, and any bits."""
    near = generator(fmt.name, dtype.name).uniform(-1.2, 1.2, (EXTREME.size, 512)) * fmt.max
    near[:, ::2] *= 2.0 ** generator(dtype.name).integers(-24, 0, near[:, ::2].shape)
    with np.errstate(all="ignore"):
        near = (near / EXTREME.astype(np.float64)).astype(dtype)
    return np.concatenate([near, any_bits(dtype, EXTREME.size * 256).reshape(EXTREME.size, 256)], axis=1)


@row("encode")
def encode(full: bool) -> Iterator[Call]:
    for fmt, dtype, _ in combinations(full):
        yield Call("encode", values(fmt, dtype, full), fmt, formats=(fmt,))


@row("encode_stochastic")
def encode_stochastic(full: bool) -> Iterator[Call]:
    for fmt, dtype, _ in combinations(full):
        x = values(fmt, dtype, full)
        yield Call("encode_stochastic", x, fmt, random_bits(x.shape), formats=(fmt,))


@row("decode")
def decode(full: bool) -> Iterator[Call]:
    for fmt in (*DATA_FORMATS, E8M0):
        yield Call("decode", all_codes(fmt), fmt)


@row("amax")
def amax(full: bool) -> Iterator[Call]:
    for number, name in enumerate(DTYPES):
        for shape in (*shapes(full, name), ()):
            x = array(numpy_dtype(name), shape, (1, 8)) if shape else np.asarray(numpy_dtype(name).type(-3))
            for axis in (None, *range(len(shape)), *([(0, -1)] if len(shape) > 1 else [])):
                for keep in (False, True) if full else (bool(number),):
                    yield Call("amax", x, axis, keep)


@row("amax_to_scale", "amax_to_scale")
@row("amax_to_scale_inv", "amax_to_scale_inv")
def amax_to_scale(full: bool, name: str) -> Iterator[Call]:
    amax = amaxes(full)
    for fmt in DATA_FORMATS:
        for policy in policies(full, fmt):
            yield Call(name, amax, fmt, policy, any_bits(np.float32, amax.size))
        yield Call(name, amax, fmt)


@row("reciprocal")
def reciprocal(full: bool) -> Iterator[Call]:
    huge = generator("huge").integers(252 << 23, 255 << 23, count(full), np.int32).view(np.float32)
    for scale in (any_bits(np.float32, count(full)), huge, adversarial_amax(), np.float32(3)):
        yield Call("reciprocal", np.asarray(scale))


@row("quantize tensorwise")
def quantize(full: bool) -> Iterator[Call]:
    for fmt, dtype, _ in combinations(full):
        for scale in SCALES if full else SCALES[:4]:
            yield Call("quantize", values(fmt, dtype, full), np.asarray(scale), fmt, formats=(fmt,))


@row("quantize, extreme scales")
def quantize_extreme(full: bool) -> Iterator[Call]:
    for fmt, dtype, _ in combinations(full):
        yield Call("quantize", reaching(fmt, dtype), EXTREME, fmt, formats=(fmt,))


@row("quantize_stochastic")
def quantize_stochastic(full: bool) -> Iterator[Call]:
    for fmt, dtype, _ in combinations(full):
        x = reaching(fmt, dtype)
        yield Call("quantize_stochastic", x, EXTREME, fmt, random_bits(x.shape), formats=(fmt,))


@row("dequantize")
def dequantize(full: bool) -> Iterator[Call]:
    large = generator("deq").uniform(1, 2, 48) * 2.0 ** np.arange(80, 128)
    scale = np.concatenate([EXTREME, large[:, None]]).astype(np.float32)
    for fmt in DATA_FORMATS:
        for dtype in DTYPES:
            yield Call("dequantize", np.tile(all_codes(fmt), (scale.size, 1)), scale, fmt, dtype)


@row("fake_quantize")
def fake_quantize(full: bool) -> Iterator[Call]:
    def there_and_back(lib: Implementation, x: Any, scale: Any, fmt: Format, dtype: Any) -> Any:
        if hasattr(lib.f8, "fake_quantize"):
            return lib.f8.fake_quantize(x, scale, fmt)
        return lib.f8.dequantize(lib.f8.quantize(x, scale, fmt), scale, fmt, dtype)

    for fmt, dtype, name in combinations(full):
        yield Call(there_and_back, values(fmt, dtype, full), np.asarray(SCALES[1]), fmt, name)


@row("quantize_rowwise")
def quantize_rowwise(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        for shape in shapes(full, name):
            for axis, policy in ((-1, CANONICAL), (0, PRESETS["te_current"](pow2=True))):
                x = array(dtype, shape, (1, max(shape[-1], 1)) if axis else (max(shape[0], 1), 1))
                yield Call("quantize_rowwise", x, fmt, axis, policy, formats=(fmt, None))


@row("blockwise 1x128", (1, 128))
@row("blockwise 128x128", (128, 128))
def blockwise(full: bool, block: tuple[int, int]) -> Iterator[Call]:
    """Quantize and go back, so that data, scales and values are compared."""
    rules = (CANONICAL, PRESETS["te_current"](eps=1e-4), PRESETS["te_current"]())

    def there_and_back(lib: Implementation, x: Any, fmt: Format, rule: Any, dtype: Any) -> tuple[Any, Any, Any]:
        data, scale = lib.f8.quantize_blockwise(x, fmt, block, rule)
        return data, scale, lib.f8.dequantize_blockwise(data, scale, fmt, block, dtype)

    for fmt, dtype, name in combinations(full):
        for number, shape in enumerate(shapes(full, name, square=block[0] > 1)):
            turn = (number + DATA_FORMATS.index(fmt) + (dtype.itemsize == 2)) % len(rules)
            for policy in rules if full else rules[turn:][:1]:
                x = array(dtype, shape, block)
                yield Call(there_and_back, x, fmt, policy, name, formats=(fmt, None, None))


@row("MX 1x32")
def mx(full: bool) -> Iterator[Call]:
    def there_and_back(lib: Implementation, x: Any, fmt: Format, mode: Any, dtype: Any) -> tuple[Any, Any, Any]:
        data, scale = lib.f8.quantize_mx(x, fmt, mode)
        return data, scale, lib.f8.dequantize_mx(data, scale, fmt, dtype)

    for fmt, dtype, name in combinations(full):
        for number, shape in enumerate(shapes(full, name)):
            # E4M3 and E5M2 get every mode in a short run too, the FNUZ formats one in turn.
            every = full or (number == 0 and name == "float32" and not fmt.fnuz)
            for mode in MX_MODES if every else MX_MODES[number % len(MX_MODES) :][:1]:
                x = array(dtype, shape, MX_BLOCK)
                yield Call(there_and_back, x, fmt, mode, name, formats=(fmt, E8M0, None))


@row("dequantize_mx, every scale")
def dequantize_mx(full: bool) -> Iterator[Call]:
    scales = np.repeat(all_codes(E8M0)[:, None], 8, axis=1)
    for fmt in DATA_FORMATS:
        for dtype in DTYPES:
            yield Call("dequantize_mx", np.tile(all_codes(fmt), (256, 1)), scales, fmt, dtype)


@row("E8M0 scales")
def e8m0(full: bool) -> Iterator[Call]:
    for name in ("e8m0_to_scale", "e8m0_to_scale_inv"):
        yield Call(name, all_codes(E8M0))
    for fmt in DATA_FORMATS:
        for mode in MX_MODES:
            yield Call("amax_to_e8m0", amaxes(full), fmt, mode, formats=(E8M0,))


@row("delayed scaling")
def history(full: bool) -> Iterator[Call]:
    """Roll a history for several steps and compare the window and the scale used at each, from an initial scale 1.0."""
    amaxes = np.float32([[1, 0, 2], [5, 1e-40, np.nan], [np.inf, 0, 8], [3, 3.4e38, 0.1], [0, 0, 0]])

    def steps(lib: Implementation, window: Any, scale: Any, observed: Any, fmt: Format, policy: Any) -> tuple[Any, ...]:
        used = []
        for number in range(len(amaxes)):
            if hasattr(lib.f8, "delayed_step"):
                window, scale = lib.f8.delayed_step(window, observed[number], scale, fmt, policy)[:2]
            else:
                window, amax = lib.f8.update_history(window, observed[number], policy.algo)
                scale = lib.f8.amax_to_scale(amax, fmt, policy, scale)
            used.append(scale)
        return window, *used

    short = zip(DATA_FORMATS, (4, 2, 1, 16), HISTORY_ALGOS * 2, strict=True)
    every = ((fmt, length, algo) for fmt in DATA_FORMATS for length in (1, 2, 4, 16) for algo in HISTORY_ALGOS)
    for fmt, length, algo in every if full else short:
        rule = PRESETS["te_delayed"](margin=1, history=length, algo=algo)
        window, ones = np.zeros((length, 3), np.float32), np.ones(3, np.float32)
        yield Call(steps, window, ones, amaxes, fmt, rule, formats=(None,) * (1 + len(amaxes)))
