"""The demonstration: one report with three runs, MAX equal to the reference, SUM far from it."""

import json

import pytest

pytest.importorskip("optax", reason="the demo needs optax")
pytest.importorskip("matplotlib", reason="the demo needs matplotlib")
pytest.importorskip("flax", reason="the demo needs flax")


@pytest.fixture
def text(tmp_path):
    """A file to train on."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(32, 127)) * 1000)
    return str(data)


def test_training_finds_the_amax_of_the_reference(text):
    from demos.common.corpus import load_corpus
    from demos.common.progress import Progress
    from demos.jax_owg.__main__ import parse
    from demos.jax_owg.train import train

    options = parse(["--steps", "2", "--dim", "16", "--microbatches", "2"])
    record = train("FP8-MAX", load_corpus(text), options, Progress())
    assert record.losses == pytest.approx([5.5, 5.5], rel=0.1), "it knows nothing yet: ln 256"
    assert record.amax_error < 0.02


@pytest.mark.timeout(900)
def test_the_demo_writes_its_section_and_shows_the_hazard(tmp_path, text, capsys, full):
    from demos.jax_owg.__main__ import main

    if not full:
        pytest.skip("a minute of compiling: run it with --full")
    options = ["--steps", "3", "--dim", "16", "--data", text, "--out", str(tmp_path / "report")]
    assert main(options) == 0
    report = json.loads((tmp_path / "report/report.json").read_text())
    section = report["jax_owg"]
    assert (section["stages"], section["microbatches"]) == (2, 4)
    assert list(section["runs"]) == ["f32", "FP8-MAX", "FP8-SUM"]
    assert all(len(run["losses"]) == 3 for run in section["runs"].values())
    assert section["runs"]["f32"]["losses"][0] == pytest.approx(section["runs"]["FP8-MAX"]["losses"][0], rel=1e-2)
    assert section["amax_error_vs_reference"] < 0.02
    assert section["runs"]["FP8-SUM"]["amax_error_vs_reference"] > 1
    assert (tmp_path / "report/loss.png").stat().st_size > 10_000
    assert "FP8-SUM is there as a warning" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_said_in_words():
    """Added up, the scales of layers that see zeros grow by the number of uses in each step until they overflow."""
    from demos.jax_owg.__main__ import parse
    from demos.jax_owg.results import section, summarize
    from demos.jax_owg.train import Record

    fine = Record(losses=[5.5, 3.0, 2.0], val_loss=2.0, amax_error=0.01)
    lost = Record(losses=[5.5, 5.0, float("nan")], val_loss=float("nan"), amax_error=3.0)
    runs = {"f32": fine, "FP8-MAX": fine, "FP8-SUM": lost}
    words = summarize(runs, parse(["--steps", "3"]))
    assert words.rows[0][1:] == ["2.0000", "2.0000", "no number since step 3"]
    assert "ends +0.00% from float32" in words.verdict[0]
    assert "multiplied by 4 in every step" in words.verdict[-1]
    assert "nan" not in json.dumps([words.rows, words.verdict]).lower()
    assert section(runs, parse(["--steps", "3"]))["runs"]["FP8-SUM"]["losses"] == [5.5, 5.0, None]
    assert len(summarize(runs | {"FP8-SUM": fine}, parse(["--steps", "3"])).verdict) == 3


def test_options_that_do_not_fit_are_refused(tmp_path):
    from demos.jax_owg.__main__ import parse
    from fp8_common import Fp8Error

    with pytest.raises(Fp8Error, match="--microbatches must divide 8"):
        parse(["--microbatches", "3"])
    with pytest.raises(Fp8Error, match="--dim must be a multiple of 16"):
        parse(["--dim", "20"])
