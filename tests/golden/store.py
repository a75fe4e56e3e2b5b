"""The golden vectors' file: JSON of hexadecimal words, readable in a diff."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_common.testing.compare import assert_same_bits
from tests.golden.cases import Case

FILE = Path(__file__).with_name("vectors.json")


def load(text: str | None = None) -> dict[str, Case]:
    """Return the committed vectors by name.

    Args:
        text: The JSON to read; None reads the file in this package.
    """
    data = json.loads(FILE.read_text(encoding="utf-8") if text is None else text)
    arrays = {key: _array(words) for key, words in data["inputs"].items()}
    cases = {}
    for name, case in data["cases"].items():
        inputs = {key: arrays[reference] for key, reference in case["inputs"].items()}
        outputs = {key: _array(words) for key, words in case["outputs"].items()}
        cases[name] = Case(name=name, **{**case, "inputs": inputs, "outputs": outputs})
    return cases


def dump(cases: Mapping[str, Case]) -> str:
    """Return the JSON text of the cases; equal inputs are written once."""
    inputs: dict[str, Any] = {}
    written: dict[str, str] = {}
    entries = {}
    for name, case in cases.items():
        references = {}
        for key, array in case.inputs.items():
            words = _words(array)
            # The same words get the name under which they were written first.
            references[key] = written.setdefault(json.dumps(words), f"{key}{len(written)}")
            inputs[references[key]] = words
        outputs = {key: _words(array) for key, array in case.outputs.items()}
        settings = {"function": case.function, "settings": case.settings}
        entries[name] = {**settings, "inputs": references, "outputs": outputs}
    return json.dumps({"schema": 1, "inputs": inputs, "cases": entries}, indent=0) + "\n"


def compare(committed: Mapping[str, Case], computed: Mapping[str, Case]) -> list[str]:
    """Return what is missing, new or different, one text for each.

    Any NaN equals any NaN: the sign of a computed NaN depends on the processor.
    """
    problems = [f"{name}: is not in the committed vectors" for name in computed if name not in committed]
    for name, case in committed.items():
        if name in computed:
            problems += _differences(case, computed[name])
        else:
            problems.append(f"{name}: is no longer computed")
    return problems


def _differences(committed: Case, computed: Case) -> list[str]:
    name = committed.name
    if (committed.function, committed.settings) != (computed.function, computed.settings):
        return [f"{name}: has other settings"]
    one, other = ({key: _words(array) for key, array in case.inputs.items()} for case in (committed, computed))
    if one != other:
        return [f"{name}: has other inputs"]
    if committed.outputs.keys() != computed.outputs.keys():
        return [f"{name}: has other outputs"]
    found = []
    for key, want in committed.outputs.items():
        try:
            fmt = committed.settings["fmt"] if key == "data" else None
            assert_same_bits(computed.outputs[key], want, fmt=fmt, name=f"{name}: {key}")
        except AssertionError as error:
            found.append(str(error))
    return found


def _words(array: NDArray[Any]) -> dict[str, Any]:
    """Write an array as dtype, shape and its bits, each element a hexadecimal word of fixed width."""
    # Big endian, so that the words read like the numbers, on every machine.
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(f">u{array.dtype.itemsize}")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "hex": bits.tobytes().hex()}


def _array(words: dict[str, Any]) -> NDArray[Any]:
    # np.dtype knows "bfloat16" and the float8 names because ml_dtypes, which this package imports, registers them.
    dtype = np.dtype(words["dtype"])
    bits = np.frombuffer(bytes.fromhex(words["hex"]), f">u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
    return bits.view(dtype).reshape(words["shape"])
