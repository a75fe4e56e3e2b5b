"""Every benchmark and every comparison runs, and writes its table and its figures."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.modelled import pretended_gpu
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.timeout(900)

OF_THEIR_OWN = {"convergence", "figures", "gpu"}  # tests/benchmarks, and below
BENCHMARKS = sorted({path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} - OF_THEIR_OWN)


def run(*command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_writes_its_figures_and_its_table(name, tmp_path, full):
    if not full:
        pytest.skip("benchmarks run with --full")
    if name.startswith("modelled_") and (reason := pretended_gpu.obstacle()):
        pytest.skip(reason)
    said = run(f"benchmarks.{name}", "--quick", "--results", str(tmp_path))
    results = sorted(tmp_path.glob("*.json"))
    assert len(results) == (2 if name == "casts" else 1)
    for figures in results:
        assert json.loads(figures.read_text())["versions"]
        table = figures.with_suffix(".md").read_text()
        assert table.startswith("| ")
        assert table.strip() in said


def test_tables_and_pictures_of_what_is_known_are_made(tmp_path, full):
    if not full:
        pytest.skip("certificates and pictures are made with --full")
    run("benchmarks.figures", "--results", str(tmp_path), "--pictures", str(tmp_path))
    assert json.loads((tmp_path / "certificates.json").read_text())["certificates"]["tensorwise"]
    committed = {path.name for path in (ROOT / "docs/assets").glob("*/*.svg")}
    assert {path.name for path in tmp_path.glob("*/*.svg")} == committed


def compared(rank, world_size, *arguments):
    """Run a comparison on a rank that is there already."""
    from examples import compare_fsdp

    group = dict.fromkeys(("init_process_group", "destroy_process_group"), lambda *_: None)
    with (
        mock.patch.object(sys, "argv", ["", *arguments]),
        mock.patch.multiple(compare_fsdp, leave=lambda: None, HELD_OUT_BATCHES=1),
        mock.patch.multiple(dist, is_torchelastic_launched=lambda: True, **group),
    ):
        compare_fsdp.main()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["compare_fsdp", "compare_masters", "compare_pipeline"])
def test_a_comparison_writes_its_report(run_ranks, name, tmp_path, full):
    """As users start it with --full."""
    if not full and name != "compare_fsdp":
        pytest.skip("the other comparisons run with --full")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: a report comes with its picture")
    options = ("--steps", "2", "--seeds", "2" if full else "1", "--out", str(tmp_path))
    said = run(f"examples.{name}", *options) if full else run_ranks(2, compared, *options)
    table = (tmp_path / f"{name}.md").read_text()
    assert not full or table.strip() in said
    assert "held-out loss" in table
    losses = json.loads((tmp_path / f"{name}.json").read_text())["losses"]
    assert all(0 < loss < 6 for run in losses.values() for loss in run)
    assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_every_included_table_is_there():
    """And every result that a benchmark wrote is shown somewhere, or named."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    tables = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")}
    assert {name for name in tables if f"benchmarks/results/{name}" not in pages} == set()
