"""The static report: what the machine code of every kernel needs, ours and those of given peers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.peers import NONE, Peers
from tests.helpers import aot

HEADER = (
    "| kernel | sm | bytes/elem (ideal) | inst/elem | of issue budget | registers | occupancy | shared ops | "
    "narrow | float64 | gates |"
)
RULE = "|---|---|---|---|---|---|---|---|---|---|---|"


def report(architectures: Sequence[int], dtype: str = "bfloat16", fmt: str = "e4m3", peers: Peers = NONE) -> str:
    """Return the report as a Markdown table.

    Args:
        architectures: Compute capabilities, e.g. 90.
        dtype: Input dtype.
        fmt: The FP8 format.
        peers: Whose kernels stand below ours.

    Raises:
        Fp8UnsupportedError: Triton is not installed.
    """
    return "\n".join(
        [f"triton {_version()}, {dtype} and {fmt}", "", HEADER, RULE, *rows(architectures, dtype, fmt, peers)]
    )


def rows(architectures: Iterable[int], dtype: str, fmt: str, peers: Peers = NONE) -> Iterator[str]:
    """Yield a table row per kernel and architecture, and one per peer kernel."""
    for capability in architectures:
        for case in aot.cases(dtype, fmt):
            yield _row(aot.measure(case, capability))
        for name, figures in peers.machine_code(capability):
            yield _peer_row(name, capability, figures)


def _row(figures: aot.Figures) -> str:
    case, sass = figures.case, figures.sass
    ideal = case.read + case.written
    budget = aot.INSTRUCTIONS_PER_BYTE[figures.capability] * ideal
    share = f"{100 * figures.instructions / budget:.0f} %" if budget else "-"
    per_element = f"{figures.instructions:.1f}" if budget else "-"
    wrong = "; ".join(aot.failures(figures)) or "pass"
    cells = [
        case.name,
        figures.capability,
        f"{figures.wide_bytes:.2f} ({ideal:g})",
        per_element,
        share,
        sass.registers,
        f"{100 * figures.occupancy:.0f} %",
        sass.count("LDS|STS|LDSM|STSM"),
        figures.narrow,
        sass.count("D(ADD|MUL|FMA|SETP)"),
        wrong,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _peer_row(name: str, capability: int, figures: dict[str, Any]) -> str:
    cells = [
        name,
        capability,
        "-",
        f"{figures['instructions']:.1f}",
        "-",
        figures["registers"],
        "-",
        f"{figures['shared']} ({figures['shared_bytewise']} byte-wide)",
        figures["narrow"],
        figures["float64"],
        "-",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _version() -> str:
    import triton

    return triton.__version__
