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
        f"Llama-3 70B, 64 H100, 100 Gbit/s Ethernet | 1.00x | **{told[1]}**, *modelled*; {told[2]} of bf16 gradients |"
    )
    assert row in (ROOT / "README.md").read_text()


def rows_of(name):
    """Return the rows of a committed table, by what precedes the numbers."""
    lines = (ROOT / f"benchmarks/results/{name}.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_readme_and_start_page_have_the_numbers_of_the_results():
    blocks = {who: rest for what, who, *rest in rows_of("gpu-nvidia-h100-80gb-hbm3-times") if what == "blocks"}
    milliseconds = {who: f"{float(rest[1].removesuffix(' ms')):.1f} ms" for who, rest in blocks.items()}
    speed = {who: f"{float(rest[0].removesuffix('x')) - 0.0005:.2f}x" for who, rest in blocks.items()}
    ours = f"**{milliseconds['ours-tensorwise']}, {speed['ours-tensorwise']}**; torchao {speed['torchao-tensorwise']}"
    readme = (ROOT / "README.md").read_text()
    assert f"| {milliseconds['bf16']} | {ours} |" in readme
    wires = {row[0]: [f"{float(cell):.2f}" for cell in row[2:4]] for row in rows_of("wire_bytes") if "; " in row[0]}
    plain, fp8 = (", ".join(wires[f"{name}"]) for name in ("bf16; gradients bfloat16", "tensorwise; gradients FP8"))
    assert f"| {plain} | **{fp8}** |" in readme
    means = [row[3] for row in rows_of("convergence") if row[0] == "FP8, mean of 6" and row[1] in ("16", "5")]
    assert all(f"| {mean} |" in readme for mean in means[:2]), means
    start = (ROOT / "docs/index.md").read_text()
    assert all(
        word in start for word in (milliseconds["ours-tensorwise"], milliseconds["bf16"], speed["ours-tensorwise"])
    )


def test_lines_of_code_fit_the_column():
    """The column holds 107 characters; a diff's sign and a phone's width leave less."""
    long = []
    for path in (ROOT / "README.md", *PAGES):
        for kind, block in re.findall(r"^ *```(\w+)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL):
            if kind != "output" and (path.name, kind) != ("README.md", "console"):
                long += [f"{path.name}: {line}" for line in block.splitlines() if len(line) > 88]
    assert long == []


def test_the_pages_stay_within_their_budget():
    prose = [re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in PAGES]
    assert sum(len(text.split()) for text in prose) <= 28_000
    assert len(PAGES) <= 38
