"""The documents: programs before and after a change run, tabs are programs, and the status table is that of the file.

README is followed by test_first_hour.py. Links and included files are checked by the strict build of the site; other
Python blocks are run by Sybil (conftest.py).
"""

import json
import re

import pytest

from fp8_common import advise
from fp8_common._machine import gpu_table
from tests.helpers import programs
from tests.helpers.repository import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
CHANGES = {
    f"{path.stem}-{number}": change
    for path in PAGES
    for number, change in enumerate(programs.changes(path.read_text()))
}
TABS = [
    pytest.param(code, id=f"{path.stem}-{name}".replace(" ", "-"))
    for path in PAGES
    for name, code in programs.tabs(path.read_text())
    if code
]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_is_valid_before_a_change_and_runs_after_it(change):
    compile(change.before, "before", "exec")
    compile(change.after, "after", "exec")
    if absent := programs.missing(change.after):
        pytest.skip(f"{', '.join(absent)} is not installed: the program is compiled and not run")
    printed = programs.run(change.after, "after")
    if change.output is not None:
        assert programs.complaint(change.output, printed) is None


@pytest.mark.parametrize("program", TABS)
def test_a_tab_is_a_program_of_its_own(program):
    if absent := programs.missing(program):
        pytest.skip(f"{', '.join(absent)} is not installed: the program is compiled and not run")
    programs.run(program, "tab")


def test_the_status_table_is_that_of_the_file():
    """Columns that say the same of every device are one."""
    status = json.loads((ROOT / "shared-kernels/src/fp8_common/status.json").read_text())
    columns = {}
    for name, title in status["columns"].items():
        columns.setdefault(tuple(", ".join(one["status"][name]) for one in status["devices"]), []).append(title)
    rows = [("device", *map(", ".join, columns.values())), ("---",) * (1 + len(columns))]
    rows += zip([one["title"] for one in status["devices"]], *columns, strict=True)
    table = "\n".join(f"| {' | '.join(row)} |".replace("| --- ", "|---").replace("--- |", "---|") for row in rows)
    page = (ROOT / "docs/status.md").read_text()
    assert table in page, f"docs/status.md should hold this table:\n{table}"
    assert all(f"- **{word}**: {meaning}." in page for word, meaning in status["words"].items())


def test_the_table_of_gpus_is_that_of_the_file_and_of_doctor():
    head, *rows = gpu_table()
    table = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    table.insert(1, f"|{'---|' * len(head)}")
    expected = "\n".join(table)
    assert expected in (ROOT / "docs/status.md").read_text(), f"docs/status.md should hold this table:\n{expected}"


def test_readme_has_the_number_that_advise_prints():
    job = advise.Job(shape=advise.SHAPES["llama3-70b"], ranks=64, links=advise.LINKS["ethernet-100"])
    told = re.search(r": ([\d.]+x) bf16 \(([\d.]+x) bf16 with gradients", advise.advise(job)[0])
    row = (
        f"| Llama-3 70B, 64 H100, 100 Gbit/s Ethernet | 1.00x | **{told[1]}**, *modelled*; {told[2]} of bf16 gradients"
    )
    assert row in (ROOT / "README.md").read_text()
