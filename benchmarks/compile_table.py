"""The tables of the compile guide: runs every row and writes the results down.

    python -m benchmarks.compile_table [--render]

Writes benchmarks/results/compile-table.json and the tables of docs/guides/torch-compile.md; with --render the tables
only, from the file. Counts and equalities are recorded, not times, so any machine may write them.
"""

import argparse
import itertools
import json
import platform
from pathlib import Path
from typing import Any

from tests.helpers import compile_rows as rows
from tests.helpers.ranks import rank_pools

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/compile-table.json"
PAGE = ROOT / "docs/guides/torch-compile.md"
VOCABULARIES = (32, 2256, 2257)
TABLES = ("rows", "projections")


def main() -> None:
    """Run or read, then render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="Only write the tables again from the JSON file.")
    if not parser.parse_args().render:
        RESULT.write_text(json.dumps(run(), indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), json.loads(RESULT.read_text())))


def run() -> dict[str, Any]:
    """Run every case; each prints a line as it ends."""
    import torch

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    with rank_pools() as run_ranks:
        for name, scaling, backend in itertools.product(rows.ROWS, rows.RECIPES, rows.BACKENDS):
            size = rows.ROWS[name].world_size
            found["rows"].append(run_ranks(size, rows.run_row, name, scaling, backend, timeout=900.0)[0])
            print(found["rows"][-1], flush=True)
    for scaling, backend, vocab, pad in itertools.product(rows.RECIPES, rows.BACKENDS, VOCABULARIES, (False, True)):
        found["projections"].append(rows.run_projection(scaling, backend, vocab, pad))
        print(found["projections"][-1], flush=True)
    return {
        "schema": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "blocks": rows.BLOCKS,
        "steps": rows.STEPS,
        "loss_band": rows.LOSS_BAND,
        **found,
    }


def with_tables(page: str, result: dict[str, Any]) -> str:
    """Return the text of the guide with both tables replaced by those of `result`."""
    for name, table in (("rows", row_table(result)), ("projections", projection_table(result))):
        before, _, rest = page.partition(f"<!-- table {name} -->\n")
        _, _, after = rest.partition(f"<!-- end {name} -->")
        page = f"{before}<!-- table {name} -->\n{table}<!-- end {name} -->{after}"
    return page


def row_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of the rows."""
    titles = {name: row.title for name, row in rows.ROWS.items()}
    columns = sorted({(case["scaling"], case["backend"]) for case in result["rows"]}, reverse=True)
    cells = {(case["row"], case["scaling"], case["backend"]): row_cell(case) for case in result["rows"]}
    lines = table_head(["what is compiled", *(f"{scaling}, {backend}" for scaling, backend in columns)])
    lines += [
        f"| {title} | {' | '.join(cells[name, *column] for column in columns)} |" for name, title in titles.items()
    ]
    return "\n".join(lines) + "\n"


def row_cell(case: dict[str, Any]) -> str:
    """Return what the table says about one case."""
    parts = [f"{case['graphs']} graph{'s' * (case['graphs'] != 1)}"]
    if case["fp8_gathers_in_forward"]:
        parts.append(f"gathers {case['fp8_gathers_in_forward']} + {case['fp8_gathers_in_backward']}")
    parts.append(f"{case['recompiles']} recompiles")
    same = case["same_fp8_matrices"] and case["same_scales"] and case["same_delayed_state"]
    parts.append("same bits" if same else "OTHER BITS")
    parts.append(f"loss ± {case['loss_gap']:.0e}" if case["loss_gap"] else "same loss")
    return ", ".join(parts)


def projection_table(result: dict[str, Any]) -> str:
    """Return the Markdown table of the output projections."""
    cases = result["projections"]
    columns = sorted({(case["scaling"], case["backend"]) for case in cases}, reverse=True)
    cells = {(case["vocab"], case["pad"], case["scaling"], case["backend"]): projection_cell(case) for case in cases}
    lines = table_head(["vocabulary", "`pad_inner_dim`", *(f"{scaling}, {backend}" for scaling, backend in columns)])
    for vocab, pad in itertools.product(VOCABULARIES, (False, True)):
        lines.append(f"| {vocab} | {pad} | {' | '.join(cells[vocab, pad, *column] for column in columns)} |")
    return "\n".join(lines) + "\n"


def projection_cell(case: dict[str, Any]) -> str:
    """Return what the table says about one projection."""
    same = "same bits" if case["same_as_eager"] else "OTHER BITS"
    return f"{case['graphs']} graph, {case['recompiles']} recompiles, {same}"


def table_head(titles: list[str]) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


if __name__ == "__main__":
    main()
