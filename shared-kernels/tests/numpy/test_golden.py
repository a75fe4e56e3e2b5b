"""The committed golden vectors equal what every rule computes now."""

import dataclasses

import pytest

from fp8_common import DATA_FORMATS, FORMATS, PRESETS
from fp8_common.policy import MX_MODES
from tests import golden
from tests.golden.cases import FUNCTIONS, POLICIES
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


def test_comparing_names_what_differs():
    name, case = "history/max/3", COMMITTED["history/max/3"]
    worse = dataclasses.replace(case, outputs=case.outputs | {"reduced": case.outputs["reduced"] + 1})
    (problem,) = golden.compare({name: case}, {name: worse})
    assert "reduced: 16 of 16 values (100 %) differ" in problem
    other = dataclasses.replace(case, settings={"algo": "max", "length": 4})
    assert golden.compare({name: case}, {name: other}) == [f"{name}: has other settings"]
    assert golden.compare({name: case}, {}) == [f"{name}: is no longer computed"]
    assert golden.compare({}, {name: case}) == [f"{name}: is not in the committed vectors"]
