"""Golden vectors: inputs of every numerical rule and the results that were committed, which show when a rule changes.

`python -m tests.golden` writes vectors.json anew. Other implementations give its inputs to a case's function, with the
case's settings, and compare with its outputs; those named "data" are FP8 codes of the format `settings["fmt"]`. The
inputs come from fixed formulas, never from a random generator whose stream could change.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp8_common._reference import quantize as q
from fp8_common._reference import rounding, scaling
from fp8_common.formats import DATA_FORMATS, FORMATS
from fp8_common.policy import CANONICAL, HISTORY_ALGOS, MX_MODES, POWER_OF_2, HistoryAlgo, ScalePolicy
from fp8_common.presets import mx, te_current, te_delayed
from fp8_common.testing.inputs import adversarial, adversarial_amax, all_codes, special_values

FILE = Path(__file__).with_name("vectors.json")
Arrays = dict[str, NDArray[Any]]

POLICIES: dict[str, ScalePolicy] = {
    "canonical": CANONICAL,
    "canonical_margin_3": ScalePolicy(margin=3),
    "canonical_eps": ScalePolicy(eps=2.0**-20),
    "power_of_2": POWER_OF_2,
    "te_delayed": te_delayed(),
    "te_delayed_margin_-2": te_delayed(margin=-2),
    "te_current": te_current(),
    "te_current_pow2": te_current(pow2=True),
    "te_current_eps": te_current(eps=2.0**-10),
    "power_of_2_stable": dataclasses.replace(POWER_OF_2, stable=True),
    **{f"mx_{mode}": mx(mode) for mode in MX_MODES},
}
"""The scale rules that are pinned, by name."""


def _scale(a: Arrays, fmt: str, policy: dict[str, Any]) -> Arrays:
    arguments = a["amax"], fmt, ScalePolicy.from_dict(policy)
    pair = (rule(*arguments, prev=a["prev"]) for rule in (scaling.amax_to_scale, scaling.amax_to_scale_inv))
    return dict(zip(("scale", "scale_inv"), pair, strict=True))


def _history(a: Arrays, algo: HistoryAlgo, length: int) -> Arrays:
    """Observe each row of `observed` in turn; return the history and the reduced amax after each."""
    window = np.zeros((length, *a["observed"].shape[1:]), np.float32)
    windows, reduced = [], []
    for observed in a["observed"]:
        window, used = scaling.update_history(window, observed, algo)
        windows.append(window)
        reduced.append(used)
    return {"windows": np.stack(windows), "reduced": np.stack(reduced)}


def _e8m0_scale(a: Arrays) -> Arrays:
    return {"scale": scaling.e8m0_to_scale(a["codes"]), "scale_inv": scaling.e8m0_to_scale_inv(a["codes"])}


def _dequantize(a: Arrays, fmt: str, dtype: str) -> Arrays:
    return {"x": np.asarray(q.dequantize(a["codes"], a["scale"], fmt, np.dtype(dtype)))}


FUNCTIONS: dict[str, Callable[..., Arrays]] = {
    "encode": lambda a, fmt: {"data": rounding.encode(a["x"], fmt)},
    "encode_stochastic": lambda a, fmt: {"data": rounding.encode_stochastic(a["x"], fmt, a["random_bits"])},
    "decode": lambda a, fmt: {"values": rounding.decode(a["codes"], fmt)},
    "amax": lambda a, axis: {"amax": scaling.amax(a["x"], axis=axis)},
    "amax_to_scale": _scale,
    "amax_to_e8m0": lambda a, fmt, mode: {"codes": scaling.amax_to_e8m0(a["amax"], fmt, mode)},
    "e8m0_to_scale": _e8m0_scale,
    "update_history": _history,
    "quantize": lambda a, fmt: {"data": q.quantize(a["x"], a["scale"], fmt)},
    "dequantize": _dequantize,
    "quantize_rowwise": lambda a, fmt, axis: q.quantize_rowwise(a["x"], fmt, axis)._asdict(),
    "quantize_blockwise": lambda a, fmt, block: q.quantize_blockwise(a["x"], fmt, tuple(block))._asdict(),
    "quantize_mx": lambda a, fmt, mode: q.quantize_mx(a["x"], fmt, mode)._asdict(),
}
"""What a case may call: `FUNCTIONS[function](inputs, **settings)` gives the outputs."""


def build() -> dict[str, Any]:
    """Return what the file holds: every case, computed with NumPy. Equal inputs are written once."""
    inputs: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, function, settings, arrays in (*_code_cases(), *_amax_cases(), *_tensor_cases()):
        references = {}
        for key, array in arrays.items():
            words = _words(array)
            # The same words get the name under which they were written first.
            references[key] = written.setdefault(json.dumps(words), f"{key}{len(written)}")
            inputs[references[key]] = words
        outputs = {key: _words(array) for key, array in FUNCTIONS[function](arrays, **settings).items()}
        cases[name] = {"function": function, "settings": settings, "inputs": references, "outputs": outputs}
    return {"schema": 1, "inputs": inputs, "cases": cases}


def _words(array: NDArray[Any]) -> dict[str, Any]:
    """Write an array as dtype, shape and its bits, each element a hexadecimal word of fixed width."""
    # Big endian, so that the words read like the numbers, on every machine.
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(f">u{array.dtype.itemsize}")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "hex": bits.tobytes().hex()}


def array_of(words: dict[str, Any]) -> NDArray[Any]:
    """Return the array that was written so."""
    # np.dtype knows "bfloat16" and the float8 names because ml_dtypes, which this file imports, registers them.
    dtype = np.dtype(words["dtype"])
    bits = np.frombuffer(bytes.fromhex(words["hex"]), f">u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
    return bits.view(dtype).reshape(words["shape"])


_Calls = Iterator[tuple[str, str, dict[str, Any], Arrays]]


def _code_cases() -> _Calls:
    for fmt in FORMATS:
        yield f"decode/{fmt}", "decode", {"fmt": fmt}, {"codes": all_codes(fmt)}
    for fmt in DATA_FORMATS:
        # Every fourth bit pattern in order: the vectors are committed, so their size counts.
        x = np.unique(adversarial(fmt).view(np.uint32))[::4].view(np.float32)
        yield f"encode/{fmt}", "encode", {"fmt": fmt.name}, {"x": x}
        x = mixed(96) * np.float32(fmt.smallest_normal * 2)
        given = {"x": x, "random_bits": scramble(96)}
        yield f"stochastic/{fmt}", "encode_stochastic", {"fmt": fmt.name}, given


def _amax_cases() -> _Calls:
    observed = adversarial_amax()
    # Two scales in use, neither of them 1.0, so that a result shows which one was kept.
    prev = np.array([3.5, 0.25], np.float32)[np.arange(observed.size) % 2]
    for name, policy in POLICIES.items():
        for fmt in ("e4m3", "e5m2"):
            settings = {"fmt": fmt, "policy": policy.to_dict()}
            yield f"scale/{fmt}/{name}", "amax_to_scale", settings, {"amax": observed, "prev": prev}
    for fmt in DATA_FORMATS:
        for mode in MX_MODES:
            yield f"e8m0/{fmt}/{mode}", "amax_to_e8m0", {"fmt": fmt.name, "mode": mode}, {"amax": observed}
    yield "e8m0/scale", "e8m0_to_scale", {}, {"codes": all_codes("e8m0")}
    steps = np.array([[2, 1], [3, 0], [4, np.inf], [1, 5], [np.nan, 2], [0, 0], [0, 0], [0, 1]], np.float32)
    for algo in HISTORY_ALGOS:
        for length in (1, 3):
            settings = {"algo": algo, "length": length}
            yield f"history/{algo}/{length}", "update_history", settings, {"observed": steps}


def _tensor_cases() -> _Calls:
    special = special_values()
    x = np.stack([special, mixed(special.size)])
    for axis in (None, 0, 1):
        yield f"amax/{axis}", "amax", {"axis": axis}, {"x": x}
    scale = np.array([[2.0**-126], [1], [0.7], [2.0**100], [np.inf]], np.float32)
    for fmt in DATA_FORMATS:
        yield f"quantize/{fmt}", "quantize", {"fmt": fmt.name}, {"x": special[None], "scale": scale}
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        settings = {"fmt": "e4m3", "dtype": np.dtype(dtype).name}
        codes = all_codes("e4m3")[None, ::5]
        yield f"dequantize/{settings['dtype']}", "dequantize", settings, {"codes": codes, "scale": scale[:4]}
    yield from _granularity_cases()


def _granularity_cases() -> _Calls:
    wide, tall, odd = mixed(2, 130), mixed(130, 3), mixed(3, 70)
    odd[0, 3], odd[1, 40], odd[2, :32] = np.nan, np.inf, 0
    for fmt in ("e4m3", "e5m2"):
        for axis in (-1, 0):
            yield f"rowwise/{fmt}/{axis}", "quantize_rowwise", {"fmt": fmt, "axis": axis}, {"x": odd}
        for block, x in (([1, 128], wide), ([128, 128], tall), ([2, 33], odd)):
            name, settings = f"blockwise/{fmt}/{block[0]}x{block[1]}", {"fmt": fmt, "block": block}
            yield name, "quantize_blockwise", settings, {"x": x}
        for mode in MX_MODES:
            yield f"mx/{fmt}/{mode}", "quantize_mx", {"fmt": fmt, "mode": mode}, {"x": odd}


def scramble(*shape: int) -> NDArray[np.uint32]:
    """Return well mixed uint32 words that depend on their index alone (the finalizer of MurmurHash3)."""
    word = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    # In uint64, cut to 32 bits after each product.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = ((word ^ (word >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return word.astype(np.uint32).reshape(shape)


def mixed(*shape: int) -> NDArray[np.float32]:
    """Return float32 of both signs with magnitudes from 2^-12 to 2^12 and all mantissa bits in use."""
    word = scramble(*shape)
    # Sign, exponent and mantissa from different bits of the words.
    exponent = (word >> 8) % 24 + (127 - 12)
    sign = word & np.uint32(0x80000000)
    mantissa = word * np.uint32(0x9E3779B1) >> 9
    return (sign | (exponent << 23) | mantissa).astype(np.uint32).view(np.float32)
