"""The committed golden vectors equal what every rule computes now."""

import dataclasses
import json

import numpy as np
import pytest

from fp8_common import DATA_FORMATS, FORMATS, PRESETS, Fp8Error
from fp8_common.policy import MX_MODES
from fp8_common.testing import assert_same_bits
from tests import golden
from tests.golden import __main__ as command
from tests.golden.cases import FUNCTIONS, POLICIES, mixed, scramble
from tests.golden.store import FILE, dump

COMMITTED = golden.load()


@pytest.fixture(scope="module")
def computed():
    return golden.build()


@pytest.mark.parametrize("name", COMMITTED)
def test_numpy_gives_what_was_committed(name):
    case = COMMITTED[name]
    found = FUNCTIONS[case.function](case.inputs, **case.settings)
    assert found.keys() == case.outputs.keys()
    for key, want in case.outputs.items():
        fmt = case.settings["fmt"] if key == "data" else None
        assert_same_bits(found[key], want, fmt=fmt, name=f"{name}: {key}")


def test_the_file_is_what_the_generator_writes(computed):
    assert golden.compare(COMMITTED, computed) == []
    assert FILE.read_text(encoding="utf-8") == dump(COMMITTED)


def test_the_file_is_small():
    assert len(FILE.read_bytes()) < 220_000


def test_every_rule_has_a_case():
    names = set(COMMITTED)
    assert {f"decode/{fmt}" for fmt in FORMATS} <= names
    for fmt in DATA_FORMATS:
        assert {f"encode/{fmt}", f"stochastic/{fmt}", f"quantize/{fmt}"} <= names
        assert {f"e8m0/{fmt}/{mode}" for mode in MX_MODES} <= names
    for fmt in ("e4m3", "e5m2"):
        assert {f"scale/{fmt}/{name}" for name in POLICIES} <= names
        assert {f"mx/{fmt}/{mode}" for mode in MX_MODES} <= names
        assert {f"blockwise/{fmt}/1x128", f"blockwise/{fmt}/128x128", f"rowwise/{fmt}/0", f"rowwise/{fmt}/-1"} <= names
    assert {policy.name for policy in POLICIES.values()} == {"canonical", "power_of_2", *PRESETS}
    assert {case.function for case in COMMITTED.values()} == set(FUNCTIONS)


def test_comparing_names_what_differs(computed):
    name = "history/max/3"
    case = computed[name]
    outputs = {**case.outputs, "reduced": case.outputs["reduced"] + 1}
    changed = {**computed, name: dataclasses.replace(case, outputs=outputs)}
    (problem,) = golden.compare(computed, changed)
    assert problem.startswith("history/max/3: reduced: 16 of 16 values (100 %) differ by more than 0 ULP")
    changed[name] = dataclasses.replace(case, outputs={})
    assert golden.compare(computed, changed) == ["history/max/3: has other outputs"]
    changed[name] = dataclasses.replace(case, settings={"algo": "max", "length": 4})
    assert golden.compare(computed, changed) == ["history/max/3: has other settings"]
    changed[name] = dataclasses.replace(case, inputs={})
    assert golden.compare(computed, changed) == ["history/max/3: has other inputs"]
    del changed[name]
    assert golden.compare(computed, changed) == ["history/max/3: is no longer computed"]
    assert golden.compare(changed, computed) == ["history/max/3: is not in the committed vectors"]


def test_writing_and_reading_keep_every_bit(computed):
    again = golden.load(dump(computed))
    assert golden.compare(computed, again) == []
    dtypes = {array.dtype.name for case in again.values() for array in case.outputs.values()}
    assert {"uint8", "float32", "float16", "bfloat16"} <= dtypes


def test_another_schema_is_refused():
    with pytest.raises(Fp8Error, match=r"Golden vectors must have schema 1, got 7\. .*python -m tests\.golden"):
        golden.load(json.dumps({"schema": 7}))


def test_the_command_checks_and_writes(monkeypatch, tmp_path, capsys):
    assert command.main(["--check"]) == 0
    assert "0 problem(s)" in capsys.readouterr().out
    monkeypatch.setattr(command, "FILE", tmp_path / "vectors.json")
    assert command.main([]) == 0
    written = golden.load((tmp_path / "vectors.json").read_text())
    assert golden.compare(COMMITTED, written) == []
    monkeypatch.setattr(command, "build", dict)
    assert command.main(["--check"]) == 1
    assert "decode/e4m3: is no longer computed" in capsys.readouterr().out


def test_the_inputs_do_not_depend_on_a_random_generator():
    assert scramble(3).tolist() == [0x514E28B7, 0x30F4C306, 0x85F0B427]
    x = mixed(64, 64)
    assert (x < 0).mean() == pytest.approx(0.5, abs=0.05)
    assert np.abs(x).min() >= 2.0**-12
    assert np.abs(x).max() < 2.0**12
    assert np.unique(x.view(np.uint32) & 0x7FFFFF).size > 4000
