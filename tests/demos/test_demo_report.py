"""The demo report: each demo adds its section to the file, and words and picture follow from the numbers."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from demos.common import plot, report
from fp8_common import Fp8Error

FULL = Path("/dev/full")
"""A device of Linux that refuses every byte as a full disk does."""
SUMMARY = report.Summary(
    title="A part", columns=["", "bf16", "FP8"], rows=[["loss", "2.1", "2.2"]], verdict=["Short.", "Long."]
)
RUN = {"losses": [5.0, 4.0, 3.0], "val_loss": 3.1, "fp8_weight_bytes_per_step": 2_000_000}
SECTION = {"ranks": 2, "runs": {"bf16": RUN, "fp8": RUN}}
DATA = {"path": "python-stdlib", "bytes": 1234567}


def merged(earlier=None, name="torch_fsdp", data=DATA, versions=None):
    return report.merge(
        earlier,
        machine={"system": "Linux", "cores": 2},
        versions=versions or {"torch": "2"},
        data=data,
        name=name,
        section=SECTION,
        summary=SUMMARY,
    )


def test_the_first_section_makes_a_report_of_schema_1():
    made = merged()
    assert list(made) == ["schema", "machine", "versions", "data", "torch_fsdp"]
    assert made["schema"] == 1
    assert made["data"] == DATA
    assert made["torch_fsdp"]["runs"] == SECTION["runs"]


def test_a_second_section_stands_beside_the_first():
    both = merged(merged(), name="jax_owg", versions={"jax": "1"})
    assert list(report.sections(both)) == ["torch_fsdp", "jax_owg"]
    assert both["versions"] == {"torch": "2", "jax": "1"}


def test_a_section_replaces_its_own_earlier_one():
    earlier = merged()
    earlier["torch_fsdp"]["ranks"] = 99
    assert merged(earlier)["torch_fsdp"]["ranks"] == 2


def test_sections_of_other_data_are_dropped():
    assert list(report.sections(merged(merged(data={"path": "x", "bytes": 1}), name="jax_owg"))) == ["jax_owg"]


def test_what_is_written_can_be_read_and_added_to(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    folder = tmp_path / "new" / "demo-report"
    assert report.open_folder(folder) is None
    made = merged()
    report.write(folder, made)
    assert report.open_folder(folder) == json.loads(json.dumps(made))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "loss.png", "report.json"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["not json", "[]", '{"schema": 2}'])
def test_a_foreign_report_is_not_overwritten(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(Fp8Error, match=r"is not a report of schema 1; remove it or give --out another folder"):
        report.open_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Fp8Error, match=r"cannot be written to .* give --out a folder that can be"):
        report.open_folder(tmp_path / "file" / "report")


def test_a_disk_that_fills_up_is_a_sentence_and_keeps_the_report_that_was_there(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    report.write(tmp_path, merged())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole = Path.write_bytes

    def write_half(path, content):
        whole(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(Fp8Error, match=r"cannot be written to .*No space left on device\); make room there"):
        report.write(tmp_path, merged(name="jax_owg"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(not FULL.exists(), reason=f"this system has no {FULL}")
def test_a_device_that_is_full_is_a_sentence(tmp_path):
    (tmp_path / f".{report.REPORT}.part").symlink_to(FULL)
    with pytest.raises(Fp8Error, match="No space left on device"):
        report.write(tmp_path, merged())


def test_a_read_only_disk_is_a_sentence(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(report.tempfile, "TemporaryFile", refuse)
    with pytest.raises(Fp8Error, match=r"cannot be written to .*Read-only file system\); give --out a folder"):
        report.open_folder(tmp_path)


def test_the_readme_holds_picture_table_and_verdict():
    text = report.readme(merged())
    assert "![Training loss](loss.png)" in text
    table = "|  | bf16 | FP8 |\n| --- | ---: | ---: |\n| loss | 2.1 | 2.2 |"
    assert f"## A part\n\n**Short.**\n\n{table}\n\n- Long." in text
    assert "python-stdlib, 1,234,567 bytes" in text


def test_the_plain_table_is_aligned():
    words = {"columns": ["", "a"], "rows": [["loss", "2"], ["x", "10"]]}
    assert report.plain_table(words) == "       a\nloss   2\nx     10"


def test_smoothing_is_the_mean_of_the_steps_before():
    losses = list(np.random.default_rng(0).normal(size=100))
    expected = [np.mean(losses[max(0, i - 4) : i + 1]) for i in range(100)]
    np.testing.assert_allclose(plot.smooth(losses), expected, rtol=1e-12)
    np.testing.assert_array_equal(plot.smooth([3.0, 1.0]), [3.0, 1.0])


def test_every_section_gets_its_row_in_the_picture():
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    heights = [int.from_bytes(plot.draw(made)[20:24], "big") for made in (merged(), merged(merged(), name="jax_owg"))]
    assert heights[1] == 2 * heights[0]


def test_without_matplotlib_the_demo_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Fp8Error, match=r"pip install matplotlib"):
        plot.require_matplotlib()
