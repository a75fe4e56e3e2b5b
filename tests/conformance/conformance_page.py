"""The committed conformance matrix on its page: `python tests/conformance/conformance_page.py` writes it."""

from pathlib import Path

from tests.conformance import conformance_matrix as matrix

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks/results/conformance.json"
PAGE = ROOT / "docs/develop/conformance.md"
BEGIN, END = "<!-- figures of benchmarks/results/conformance.json -->\n", "\n<!-- end of figures -->"


def rendered(results: matrix.Results) -> str:
    """Return the matrix and its sum as they stand on the page."""
    return f"{BEGIN}\n{matrix.as_markdown(results)}\n\n**{matrix.total(results)}.**\n{END}"


def main() -> None:
    """Put the kept matrix into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{rendered(matrix.load(KEPT))}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
