"""The calls that are compared: one row for each operation and granularity, with its inputs.

A call is written once, with the names that NumPy, torch and JAX share; the implementations differ in their arrays only.
The lambdas take loop variables as defaults (`f=fmt`), because they run after the loop: a free variable would have its
last value by then.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_common import CANONICAL, DATA_FORMATS, E8M0, PRESETS, Format
from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.policy import HISTORY_ALGOS, MX_MODES
from fp8_common.testing import adversarial_amax, all_codes
from tests.helpers.conformance_implementations import Implementation
from tests.helpers.conformance_inputs import (
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of an operation.

    Attributes:
        label: Says in failures which inputs and options these are.
        run: `run(implementation, *arrays)`; returns one result or a tuple of results.
        arrays: The inputs; the first is shown as the source of results that have its shape.
        formats: The FP8 format of each result, None for floats.
    """

    label: str
    run: Callable[..., Any]
    arrays: tuple[NDArray[Any], ...]
    formats: tuple[Format | None, ...] = (None,)


Row = Callable[[bool], Iterator[Call]]
ROWS: dict[str, Row] = {}
"""The table: each row's calls, as a function of whether the whole matrix was asked for."""


def row(name: str) -> Callable[[Row], Row]:
    """Put a function into the table."""

    def add(function: Row) -> Row:
        ROWS[name] = function
        return function

    return add


def random_bits(shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Return random bits for stochastic rounding; the smallest and largest values are among them."""
    bits = generator("bits", shape).integers(0, 2**32, shape, np.uint32)
    bits.reshape(-1)[::5], bits.reshape(-1)[1::5] = 0, 2**32 - 1
    return bits


@row("encode")
def encode(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        x = values(fmt, dtype, full)
        yield Call(label=f"{fmt} {name}", run=lambda lib, x, f=fmt: lib.f8.encode(x, f), arrays=(x,), formats=(fmt,))


@row("encode_stochastic")
def encode_stochastic(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        x = values(fmt, dtype, full)
        yield Call(
            label=f"{fmt} {name}",
            run=lambda lib, x, bits, f=fmt: lib.f8.encode_stochastic(x, f, bits),
            arrays=(x, random_bits(x.shape)),
            formats=(fmt,),
        )


@row("decode")
def decode(full: bool) -> Iterator[Call]:
    for fmt in (*DATA_FORMATS, E8M0):
        yield Call(label=str(fmt), run=lambda lib, q, f=fmt: lib.f8.decode(q, f), arrays=(all_codes(fmt),))


@row("amax")
def amax(full: bool) -> Iterator[Call]:
    for number, name in enumerate(DTYPES):
        for shape in (*shapes(full, name), ()):
            x = array(numpy_dtype(name), shape, (1, 8)) if shape else np.asarray(numpy_dtype(name).type(-3))
            for axis in (None, *range(len(shape)), *([(0, -1)] if len(shape) > 1 else [])):
                for keep in (False, True) if full else (bool(number),):
                    yield Call(
                        label=f"{name} {shape} axis={axis} keepdims={keep}",
                        run=lambda lib, x, a=axis, k=keep: lib.f8.amax(x, axis=a, keepdims=k),
                        arrays=(x,),
                    )


@row("amax_to_scale")
def amax_to_scale(full: bool) -> Iterator[Call]:
    yield from _scales("amax_to_scale", full)


@row("amax_to_scale_inv")
def amax_to_scale_inv(full: bool) -> Iterator[Call]:
    yield from _scales("amax_to_scale_inv", full)


def _scales(name: str, full: bool) -> Iterator[Call]:
    amax = np.concatenate([adversarial_amax(), np.abs(any_bits(np.float32, count_amax(full)))])
    prev = any_bits(np.float32, amax.size)
    for fmt in DATA_FORMATS:
        for policy in policies(full, fmt):
            margin = f"margin {policy.margin}, power_of_2 {policy.power_of_2}, eps {policy.eps:g}, {policy.mx_mode}"
            margin += ", stable" * policy.stable
            yield Call(
                label=f"{fmt} {policy.name} ({margin})",
                run=lambda lib, a, p, f=fmt, rule=policy: getattr(lib.f8, name)(a, f, rule, p),
                arrays=(amax, prev),
            )
        yield Call(
            label=f"{fmt} without a previous scale",
            run=lambda lib, a, f=fmt: getattr(lib.f8, name)(a, f),
            arrays=(amax,),
        )


@row("reciprocal")
def reciprocal(full: bool) -> Iterator[Call]:
    huge = generator("huge").integers(252 << 23, 255 << 23, count(full), np.int32).view(np.float32)
    for name, scale in {
        "any bits": any_bits(np.float32, count(full)),
        "above 2^125": huge,
        "amax": adversarial_amax(),
        "scalar": np.float32(3),
    }.items():
        yield Call(label=name, run=lambda lib, s: lib.f8.reciprocal(s), arrays=(np.asarray(scale),))


@row("quantize tensorwise")
def quantize(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        x = values(fmt, dtype, full)
        for scale in SCALES if full else SCALES[:4]:
            yield Call(
                label=f"{fmt} {name} scale {scale:g}",
                run=lambda lib, x, s, f=fmt: lib.f8.quantize(x, s, f),
                arrays=(x, np.asarray(scale)),
                formats=(fmt,),
            )


@row("quantize, extreme scales")
def quantize_extreme(full: bool) -> Iterator[Call]:
    scale = np.concatenate([SCALES, NONFINITE_SCALES])[:, None]
    for fmt, dtype, name in combinations(full):
        yield Call(
            label=f"{fmt} {name}",
            run=lambda lib, x, s, f=fmt: lib.f8.quantize(x, s, f),
            arrays=(_reaching(fmt, dtype, scale), scale),
            formats=(fmt,),
        )


def _reaching(fmt: Format, dtype: np.dtype, scale: NDArray[np.float32]) -> NDArray[np.generic]:
    """Return a row for each scale: values that it brings near the range of `fmt`, and any bits."""
    near = generator(fmt.name, dtype.name).uniform(-1.2, 1.2, (scale.size, 512)) * fmt.max
    near[:, ::2] *= 2.0 ** generator(dtype.name).integers(-24, 0, near[:, ::2].shape)
    with np.errstate(all="ignore"):
        near = (near / scale.astype(np.float64)).astype(dtype)
    anything = any_bits(dtype, scale.size * 256).reshape(scale.size, 256)
    return np.concatenate([near, anything], axis=1)


@row("quantize_stochastic")
def quantize_stochastic(full: bool) -> Iterator[Call]:
    scale = np.concatenate([SCALES, NONFINITE_SCALES])[:, None]
    for fmt, dtype, name in combinations(full):
        x = _reaching(fmt, dtype, scale)
        yield Call(
            label=f"{fmt} {name}",
            run=lambda lib, x, s, bits, f=fmt: lib.f8.quantize_stochastic(x, s, f, bits),
            arrays=(x, scale, random_bits(x.shape)),
            formats=(fmt,),
        )


@row("dequantize")
def dequantize(full: bool) -> Iterator[Call]:
    extreme = np.concatenate([SCALES, NONFINITE_SCALES, generator("deq").uniform(1, 2, 48) * 2.0 ** np.arange(80, 128)])
    scale = extreme.astype(np.float32)[:, None]
    for fmt in DATA_FORMATS:
        codes = np.tile(all_codes(fmt), (scale.size, 1))
        for dtype in DTYPES:
            yield Call(
                label=f"{fmt} to {dtype}",
                run=lambda lib, q, s, f=fmt, d=dtype: lib.f8.dequantize(q, s, f, lib.dtype(d)),
                arrays=(codes, scale),
            )


@row("fake_quantize")
def fake_quantize(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        yield Call(
            label=f"{fmt} {name}",
            run=lambda lib, x, s, f=fmt, d=name: _there_and_back(lib, x, s, f, d),
            arrays=(values(fmt, dtype, full), np.asarray(SCALES[1])),
        )


def _there_and_back(lib: Implementation, x: Any, scale: Any, fmt: Format, dtype: str) -> Any:
    if hasattr(lib.f8, "fake_quantize"):
        return lib.f8.fake_quantize(x, scale, fmt)
    return lib.f8.dequantize(lib.f8.quantize(x, scale, fmt), scale, fmt, lib.dtype(dtype))


@row("quantize_rowwise")
def quantize_rowwise(full: bool) -> Iterator[Call]:
    for fmt, dtype, name in combinations(full):
        for shape in shapes(full, name):
            for axis, policy in ((-1, CANONICAL), (0, PRESETS["te_current"](pow2=True))):
                yield Call(
                    label=f"{fmt} {name} {shape} axis={axis}",
                    run=lambda lib, x, f=fmt, a=axis, p=policy: lib.f8.quantize_rowwise(x, f, a, p),
                    arrays=(array(dtype, shape, (1, max(shape[-1], 1)) if axis else (max(shape[0], 1), 1)),),
                    formats=(fmt, None),
                )


@row("blockwise 1x128")
def blockwise_rows(full: bool) -> Iterator[Call]:
    yield from _blockwise((1, 128), full)


@row("blockwise 128x128")
def blockwise_squares(full: bool) -> Iterator[Call]:
    yield from _blockwise((128, 128), full)


def _blockwise(block: tuple[int, int], full: bool) -> Iterator[Call]:
    """Quantize and go back, so that data, scales and values are compared."""
    rules = (CANONICAL, PRESETS["deepgemm"](ue8m0=True), PRESETS["te_current"]())

    def run(lib: Implementation, x: Any, fmt: Format, rule: Any, dtype: str) -> tuple[Any, Any, Any]:
        data, scale = lib.f8.quantize_blockwise(x, fmt, block, rule)
        return data, scale, lib.f8.dequantize_blockwise(data, scale, fmt, block, lib.dtype(dtype))

    for fmt, dtype, name in combinations(full):
        for number, shape in enumerate(shapes(full, name, square=block[0] > 1)):
            turn = (number + DATA_FORMATS.index(fmt) + (dtype.itemsize == 2)) % len(rules)
            for policy in rules if full else rules[turn:][:1]:
                yield Call(
                    label=f"{fmt} {name} {shape} {policy.name}",
                    run=lambda lib, x, f=fmt, p=policy, d=name: run(lib, x, f, p, d),
                    arrays=(array(dtype, shape, block),),
                    formats=(fmt, None, None),
                )


@row("MX 1x32")
def mx(full: bool) -> Iterator[Call]:
    def run(lib: Implementation, x: Any, fmt: Format, mode: Any, dtype: str) -> tuple[Any, Any, Any]:
        data, scale = lib.f8.quantize_mx(x, fmt, mode)
        return data, scale, lib.f8.dequantize_mx(data, scale, fmt, lib.dtype(dtype))

    for fmt, dtype, name in combinations(full):
        for number, shape in enumerate(shapes(full, name)):
            # E4M3 and E5M2 get every mode in a short run too, the FNUZ formats one in turn.
            every = full or (number == 0 and name == "float32" and not fmt.fnuz)
            for mode in MX_MODES if every else MX_MODES[number % len(MX_MODES) :][:1]:
                yield Call(
                    label=f"{fmt} {name} {shape} {mode}",
                    run=lambda lib, x, f=fmt, m=mode, d=name: run(lib, x, f, m, d),
                    arrays=(array(dtype, shape, MX_BLOCK),),
                    formats=(fmt, E8M0, None),
                )


@row("dequantize_mx, every scale")
def dequantize_mx(full: bool) -> Iterator[Call]:
    scales = np.repeat(all_codes(E8M0)[:, None], 8, axis=1)
    for fmt in DATA_FORMATS:
        codes = np.tile(all_codes(fmt), (256, 1))
        for dtype in DTYPES:
            yield Call(
                label=f"{fmt} to {dtype}",
                run=lambda lib, q, s, f=fmt, d=dtype: lib.f8.dequantize_mx(q, s, f, lib.dtype(d)),
                arrays=(codes, scales),
            )


@row("E8M0 scales")
def e8m0(full: bool) -> Iterator[Call]:
    amax = np.concatenate([adversarial_amax(), np.abs(any_bits(np.float32, count_amax(full)))])
    for fmt in DATA_FORMATS:
        for mode in MX_MODES:
            yield Call(
                label=f"amax_to_e8m0 {fmt} {mode}",
                run=lambda lib, a, f=fmt, m=mode: lib.f8.amax_to_e8m0(a, f, m),
                arrays=(amax,),
                formats=(E8M0,),
            )
    for name in ("e8m0_to_scale", "e8m0_to_scale_inv"):
        yield Call(label=name, run=lambda lib, q, n=name: getattr(lib.f8, n)(q), arrays=(all_codes(E8M0),))


@row("delayed scaling")
def history(full: bool) -> Iterator[Call]:
    """Roll a history for several steps and compare the window and the scale used at each, from an initial scale 1.0."""
    amaxes = np.float32([[1, 0, 2], [5, 1e-40, np.nan], [np.inf, 0, 8], [3, 3.4e38, 0.1], [0, 0, 0]])

    def step(lib: Implementation, window: Any, observed: Any, scale: Any, fmt: Format, policy: Any) -> tuple[Any, Any]:
        if hasattr(lib.f8, "delayed_step"):
            return lib.f8.delayed_step(window, observed, scale, fmt, policy)[:2]
        window, amax = lib.f8.update_history(window, observed, policy.algo)
        return window, lib.f8.amax_to_scale(amax, fmt, policy, scale)

    def run(lib: Implementation, window: Any, scale: Any, observed: Any, fmt: Format, policy: Any) -> tuple[Any, ...]:
        used = []
        for number in range(len(amaxes)):
            window, scale = step(lib, window, observed[number], scale, fmt, policy)
            used.append(scale)
        return window, *used

    lengths = {"e4m3": 4, "e5m2": 16, "e4m3fnuz": 1, "e5m2fnuz": 2}
    for fmt in DATA_FORMATS:
        for algo in HISTORY_ALGOS[: 2 if full or not fmt.fnuz else 1]:
            for length in (1, 2, 4, 16) if full else (lengths[str(fmt)],):
                rule = PRESETS["te_delayed"](margin=1, history=length, algo=algo)
                yield Call(
                    label=f"{fmt} {algo} L={length}",
                    run=lambda lib, w, s, a, f=fmt, p=rule: run(lib, w, s, a, f, p),
                    arrays=(np.zeros((length, 3), np.float32), np.ones(3, np.float32), amaxes),
                    formats=(None,) * (1 + len(amaxes)),
                )
