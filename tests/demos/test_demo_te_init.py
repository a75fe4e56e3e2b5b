"""The demo from end to end, on a few steps."""

import json
import subprocess
import sys

import pytest

from demos.te_init.__main__ import parse, section_of, summarize
from demos.te_init.train import WAYS


def test_the_report_has_its_section_and_says_what_the_numbers_say(tmp_path):
    data = tmp_path / "text"
    data.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 2000)
    command = [sys.executable, "-m", "demos.te_init", "--steps=4", f"--data={data}", f"--out={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    section = json.loads((tmp_path / "out" / "report.json").read_text())["te_init"]
    assert set(section["sources"]) == set(WAYS)
    for figures in section["sources"].values():
        assert set(figures) == {"bytes_per_param", "rel_rmse", "val_loss"}
    assert section["bytes_kept_after_seed"] == 0
    sources = section["sources"]
    assert sources["cpu copy"]["rel_rmse"] == sources["replay"]["rel_rmse"] == 0
    assert sources["cpu copy"]["bytes_per_param"] == 4
    assert sources["replay"]["bytes_per_param"] < 1
    assert 0.02 < sources["dequantized"]["rel_rmse"] < sources["dither"]["rel_rmse"] < 0.05
    assert sources["cpu copy"]["val_loss"] == sources["replay"]["val_loss"] != sources["dequantized"]["val_loss"]
    for figures in sources.values():
        assert figures["val_loss"] < 6, "a model that knows nothing loses ln 256 = 5.5 nats per byte"
    for sentence in section["summary"]["verdict"]:
        assert sentence in done.stdout
    assert "kB/step" not in done.stdout, "nothing travels here"
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000


def test_a_mistake_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        parse(["--steps=none"])
    assert "whole number" in capsys.readouterr().err


def test_the_verdict_admits_what_is_still_kept():
    run = {"bytes_per_param": 4.0, "rel_rmse": 0.0, "val_loss": 1.0, "bytes_kept_after_seed": 8, "losses": [1.0]}
    assert "Something is still kept after seeding." in summarize({"cpu copy": run}).verdict
    assert (
        "Over 8 seeds and longer runs, masters from the codes ended +0.62%" in summarize({"cpu copy": run}).verdict[-1]
    )
    assert section_of({"cpu copy": run}, 1)["bytes_kept_after_seed"] == 8
