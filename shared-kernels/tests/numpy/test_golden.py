"""The committed golden vectors equal what every rule computes now."""

import dataclasses
import json

import numpy as np
import pytest

from fp8_common import DATA_FORMATS, FORMATS, PRESETS, Fp8Error
from fp8_common.policy import MX_MODES
from tests import golden
from tests.golden import __main__ as command
from tests.golden.cases import FUNCTIONS, POLICIES, mixed, scramble
from tests.golden.store import FILE, dump

COMMITTED = golden.load()


@pytest.fixture(scope="module")
def computed():
    return golden.build()


@pytest.mark.parametrize("name", COMMITTED)
def test_numpy_gives_what_was_committed(name, computed):
    assert golden.compare({name: COMMITTED[name]}, {name: computed[name]}) == []


def test_the_file_is_small_and_what_the_generator_writes(computed):
    assert golden.compare(COMMITTED, computed) == golden.compare(computed, golden.load(dump(computed))) == []
    assert FILE.read_text(encoding="utf-8") == dump(COMMITTED)
    assert len(FILE.read_bytes()) < 220_000


def test_every_rule_has_a_case():
    names = {f"decode/{fmt}" for fmt in FORMATS}
    for fmt in DATA_FORMATS:
        names |= {f"encode/{fmt}", f"stochastic/{fmt}", f"quantize/{fmt}"}
        names |= {f"e8m0/{fmt}/{mode}" for mode in MX_MODES}
    for fmt in ("e4m3", "e5m2"):
        names |= {f"scale/{fmt}/{name}" for name in POLICIES} | {f"mx/{fmt}/{mode}" for mode in MX_MODES}
        names |= {f"blockwise/{fmt}/1x128", f"blockwise/{fmt}/128x128", f"rowwise/{fmt}/0", f"rowwise/{fmt}/-1"}
    assert names <= set(COMMITTED)
    assert {policy.name for policy in POLICIES.values()} == {"canonical", "power_of_2", *PRESETS}
    assert {case.function for case in COMMITTED.values()} == set(FUNCTIONS)


NAME = "history/max/3"
CHANGES = {
    "reduced: 16 of 16 values (100 %) differ by more than 0 ULP": lambda case: {
        "outputs": {**case.outputs, "reduced": case.outputs["reduced"] + 1}
    },
    "has other outputs": lambda case: {"outputs": {}},
    "has other settings": lambda case: {"settings": {"algo": "max", "length": 4}},
    "has other inputs": lambda case: {"inputs": {}},
}


@pytest.mark.parametrize("said", CHANGES)
def test_comparing_names_what_differs(said):
    case = COMMITTED[NAME]
    (problem,) = golden.compare(COMMITTED, {**COMMITTED, NAME: dataclasses.replace(case, **CHANGES[said](case))})
    assert problem.startswith(f"{NAME}: {said}")
    fewer = {name: case for name, case in COMMITTED.items() if name != NAME}
    assert golden.compare(COMMITTED, fewer) == [f"{NAME}: is no longer computed"]
    assert golden.compare(fewer, COMMITTED) == [f"{NAME}: is not in the committed vectors"]


def test_another_schema_is_refused():
    with pytest.raises(Fp8Error, match=r"Golden vectors must have schema 1, got 7\. .*python -m tests\.golden"):
        golden.load(json.dumps({"schema": 7}))


def test_the_command_checks_and_writes(monkeypatch, tmp_path, capsys, computed):
    monkeypatch.setattr(command, "build", lambda: computed)
    monkeypatch.setattr(command, "FILE", tmp_path / "vectors.json")
    assert command.main([]) == command.main(["--check"]) == 0
    assert "0 problem(s)" in capsys.readouterr().out
    assert golden.compare(COMMITTED, golden.load((tmp_path / "vectors.json").read_text())) == []
    monkeypatch.setattr(command, "build", dict)
    assert command.main(["--check"]) == 1
    assert "decode/e4m3: is no longer computed" in capsys.readouterr().out


def test_the_inputs_do_not_depend_on_a_random_generator():
    assert scramble(3).tolist() == [0x514E28B7, 0x30F4C306, 0x85F0B427]
    x = mixed(64, 64)
    assert (x < 0).mean() == pytest.approx(0.5, abs=0.05)
    assert 2.0**-12 <= np.abs(x).min() <= np.abs(x).max() < 2.0**12
