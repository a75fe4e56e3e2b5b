"""The committed golden vectors equal what every rule computes now."""

import json

import pytest

from fp8_common.presets import PRESETS
from fp8_common.testing import assert_same_bits
from tests.golden import FILE, FUNCTIONS, POLICIES, array_of, build

COMMITTED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", COMMITTED["cases"])
def test_numpy_gives_the_committed_vectors(name):
    case = COMMITTED["cases"][name]
    inputs = {key: array_of(COMMITTED["inputs"][reference]) for key, reference in case["inputs"].items()}
    outputs = FUNCTIONS[case["function"]](inputs, **case["settings"])
    assert outputs.keys() == case["outputs"].keys()
    for key, words in case["outputs"].items():
        fmt = case["settings"]["fmt"] if key == "data" else None
        assert_same_bits(outputs[key], array_of(words), fmt=fmt, name=f"{name}: {key}")


def test_the_file_is_small_and_holds_the_cases_of_the_generator_for_every_rule():
    made = build()
    for case, committed in zip(made["cases"].values(), COMMITTED["cases"].values(), strict=True):
        case["outputs"] = committed["outputs"]  # compared above: the sign of a computed NaN depends on the processor
    assert made == COMMITTED
    assert len(FILE.read_bytes()) < 220_000
    assert {policy.name for policy in POLICIES.values()} == {"canonical", "power_of_2", *PRESETS}
    assert {case["function"] for case in COMMITTED["cases"].values()} == set(FUNCTIONS)
