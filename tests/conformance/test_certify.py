"""`certify`: planted violations are found and named, honest models pass, the page's table is what runs say."""

import importlib.util
import json
import multiprocessing
import re
from importlib import metadata

import numpy as np
import pytest
import torch

from fp8_common import Fp8Error, Recipe, _command
from fp8_common.presets import mx
from fp8_common.recipe import CastRecipe
from fp8_common.testing import certify
from fp8_common.testing.certify import GRADIENT, PropertyResult, cast_of, casts_of, engines, explanations, rows, table
from fp8_common.torch.certify import Function, ranks
from tests.helpers import planted
from tests.helpers.ranks import PRELOADED
from tests.helpers.repository import ROOT

INPUTS = torch.randint(-8, 9, (4, 4, 6), generator=torch.Generator().manual_seed(0)).float()
HONEST = planted.Planted(torch.nn.Identity())

# the layer that breaks a property, and what it keeps
VIOLATIONS = {
    "causal": (planted.peek, ("batch-invariant", "replayable")),
    "batch-invariant": (planted.divide_by_the_largest_of_the_batch, ("causal", "replayable")),
    "padding-invariant": (planted.add_the_mean_over_tokens, ("batch-invariant", "replayable")),
    "chunk-invariant": (planted.multiply_by_the_number_of_examples, ("causal", "batch-invariant", "replayable")),
    "replayable": (planted.Forgets(), ("causal", "batch-invariant", "padding-invariant")),
}


def asked(model, *properties, inputs=INPUTS, **options):
    return certify(model, inputs, properties=properties, **options)


def results(found):
    return [answer.result for answer in found.values()]


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_named_with_its_layer(name):
    layer, kept = VIOLATIONS[name]
    found = asked(planted.Planted(layer), name, *kept)
    assert found[name].layer == ("step 3: middle" if name == "replayable" else "middle")
    assert found[name].output is not None
    assert results(found) == ["no", *["yes"] * len(kept)]


def test_a_counterexample_is_one_element_and_small():
    found = asked(planted.Planted(planted.peek), "causal")["causal"]
    example, token, _ = found.input
    assert found.output[:2] == (example, token - 1)
    before, after = map(float, re.findall(r"input\[.*?\] (\S+) -> (\S+),", found.reason)[0])
    assert 0 < abs(after - before) <= 2.0**-9 * (1 + abs(before))


def test_an_honest_model_has_no_violation():
    assert set(results(asked(HONEST, "causal", "batch-invariant", "padding-invariant"))) == {"yes"}


@pytest.mark.distributed
def test_a_constant_of_the_rank_is_named(monkeypatch):
    # from a process that has imported torch: new ones would take seconds
    multiprocessing.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr("fp8_common.torch.certify.get_context", lambda _: multiprocessing.get_context("forkserver"))
    with ranks() as pool:
        model = planted.Planted(planted.add_a_constant_of_the_rank)
        found = asked(model, "mesh-invariant", pool=pool)["mesh-invariant"]
        assert (found.result, found.layer) == ("no", "middle")
        assert "on 2 ranks, rank 1" in found.reason
        assert results(asked(HONEST, "mesh-invariant", pool=pool)) == ["yes"]


def test_a_model_that_cannot_are_sent_is_not_asked_and_explanations_are_sentences():
    found = asked(lambda x: torch.round(x), "idempotent", "mesh-invariant")
    assert results(found) == ["yes", "untested"]
    assert "build=" in found["mesh-invariant"].reason
    assert table({"mine": found}, ["idempotent"]) == "|  | idempotent |\n| --- | --- |\n| mine | yes |"
    assert all(line.endswith(".") for line in explanations({"mine": found}))


def test_a_cast_or_a_function_that_is_not_idempotent_is_named():
    up, down = (CastRecipe(granularity="mx", policy=mx(mode)) for mode in ("stable", "rceil"))
    found = asked(HONEST, "idempotent", casts={"up": cast_of(up), "down": cast_of(down)})["idempotent"]
    assert (found.result, found.layer) == ("no", "down")
    assert "scale" in found.reason
    stable = Recipe(name="stable", input=up, weight=up, grad_output=up)
    assert results(asked(HONEST, "idempotent", casts=casts_of(stable))) == ["yes"]

    def truncated(x):
        return torch.floor(x * 4) / 4 - 2.0**-3

    assert asked(truncated, "idempotent")["idempotent"].layer == "truncated"


def test_tokens_are_numbers_too():
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), Function(planted.peek))
    tokens = torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(0))
    found = asked(model, "causal", "batch-invariant", inputs=tokens)
    assert (results(found), found["causal"].layer) == (["no", "yes"], "1")


def test_a_jax_function_that_peeks_is_named():
    jnp = pytest.importorskip("jax.numpy")

    def function(weight, x):
        up = x @ weight
        middle = up + jnp.concatenate([up[:, 1:], jnp.zeros_like(up[:, :1])], 1)
        return middle @ weight, {"up": up, "middle": middle}

    model, properties = (function, jnp.asarray(np.eye(6, dtype=np.float32))), ("causal", "batch-invariant")
    found = asked(model, *properties, "mesh-invariant", "replayable", inputs=INPUTS.numpy())
    assert (results(found), found["causal"].layer) == (["no", "yes", "untested", "yes"], "middle")


def test_bad_questions_raise():
    with pytest.raises(Fp8Error, match=r"Properties are causal, .*, got 'casual'"):
        asked(torch.round, "casual")
    with pytest.raises(Fp8Error, match=r"inputs must be \[examples, tokens, ...\], at least 2 of each, got \(4, 1\)"):
        certify(torch.round, torch.ones(4, 1))


# ---------------------------------------------------------------- the table and the command

RESULTS = ROOT / "benchmarks/results"
CHEAP = ("tensorwise", "rowwise_with_gw_hp", "rowwise, stable scales", "torchao tensorwise", "JAX rowwise", "TE MX")
ASKED = ("causal", "batch-invariant", "chunk-invariant", "idempotent")


def cells(text):
    head, _, *lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.strip().splitlines()]
    return {line[0]: dict(zip(head[1:] if head[0] == "" else head, line[1:], strict=False)) for line in lines}


def test_the_table_in_the_page_is_what_runs_say():
    """Some rows and properties; `python -m benchmarks.figures certificates` writes all of them."""
    if not metadata.entry_points(group="fp8.plugins"):
        pytest.skip("no plugin is installed, only its source is there: rows come from entry points")
    found = {name: make() for name, make in rows(ASKED) if name in CHEAP}
    peers = importlib.util.find_spec("torchao") is not None
    assert set(found) == {name for name in CHEAP if peers or not name.startswith("torchao")}
    committed = json.loads((RESULTS / "certificates.json").read_text())["certificates"]
    page = cells((RESULTS / "certificates.md").read_text())
    for name, row in found.items():
        for each, answer in row.items():
            assert str(answer) == page[name][each], (name, each)
            assert answer.layer == committed[name][each]["layer"]
    assert set(page) == set(committed)
    if peers:
        peer = found["torchao tensorwise"]["causal"]
        assert (peer.result, len(peer.input), len(peer.output)) == ("no", 3, 3)
        assert peer.layer in ("up", "down")


def test_the_rows_whose_outputs_an_engine_can_give_are_named():
    both = ("causal", "batch-invariant")
    found = {"mine": asked(HONEST, *both), "other": asked(planted.Planted(planted.peek), *both)}
    found |= {"unasked": asked(HONEST, "causal")}
    gradient = PropertyResult(result="no", layer=f"up{GRADIENT}")
    found |= {"rows": {"causal": PropertyResult(result="yes"), "batch-invariant": gradient}}
    able, unable = engines(found)
    assert able.endswith("can give the outputs of: mine, rows.")
    assert "cannot give those of: other." in unable
    assert list(engines({"unasked": found["unasked"]})) == []


def test_the_command_prints_a_table_for_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom tests.helpers.planted import Planted, peek\n\n\n"
        "def factory():\n    return Planted(peek), torch.ones(2, 3, 6)\n"
    )
    assert _command.main(["certify", f"{file}:factory", "--properties", "causal", "batch-invariant"]) == 0
    said = capsys.readouterr().out
    assert "| no | yes |" in said
    assert "causal: no: with input[" in said
    assert "It cannot give those of: " in said
    for target, message in ((f"{file}:other", "has no function 'other'"), ("no.py:f", "There is no file 'no.py'")):
        assert _command.main(["certify", target]) == 2
        assert message in capsys.readouterr().err
