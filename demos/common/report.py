"""`demo-report/`: `report.json` (schema 1), which each demo adds its section to, and README.md."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demos.common import plot
from fp8_common import Fp8Error

SCHEMA = 1
REPORT, PICTURE, README = "report.json", "loss.png", "README.md"
SHARED = ("schema", "machine", "versions", "data")

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One section in words; it travels in the section, so that any demo can write the README of all.

    Attributes:
        title: heading of the section.
        columns: heads of the table.
        rows: cells of the table, as they are printed.
        verdict: what the numbers mean, a sentence each; the first one is the short answer.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: Sequence[str]


def open_folder(folder: Path) -> Report | None:
    """Make the report's folder, check that it can be written to, and return the report that is in it.

    Raises:
        Fp8Error: the folder cannot be made or written to, or its report.json is not a report of this schema.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        text = (folder / REPORT).read_text() if (folder / REPORT).exists() else None
    except OSError as error:
        raise Fp8Error(
            f"The report cannot be written to {str(folder)!r} ({error.strerror}); give --out a folder that can be."
        ) from error
    if text is None:
        return None
    try:
        report = json.loads(text)
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise Fp8Error(
            f"{str(folder / REPORT)!r} is not a report of schema {SCHEMA}; remove it or give --out another folder."
        )
    return report


def merge(
    earlier: Report | None,
    *,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    data: Mapping[str, Any],
    name: str,
    section: Mapping[str, Any],
    summary: Summary,
) -> Report:
    """Return a report with this section in it, and those of `earlier` that were made with the same data.

    Args:
        earlier: what `open_folder` returned.
        machine: facts of the machine.
        versions: package -> version; those of packages that only an earlier section used are kept.
        data: `path` and `bytes`.
        name: key of the section, such as `torch_fsdp`.
        section: its numbers.
        summary: its words.
    """
    kept = earlier if earlier and earlier.get("data") == dict(data) else {}
    shared = {
        "schema": SCHEMA,
        "machine": dict(machine),
        "versions": {**kept.get("versions", {}), **versions},
        "data": dict(data),
    }
    others = {key: value for key, value in kept.items() if key not in SHARED}
    return {**shared, **others, name: {**section, "summary": asdict(summary)}}


def write(folder: Path, report: Report) -> None:
    """Write report.json, loss.png and README.md; each appears whole or not at all.

    Raises:
        Fp8Error: The disk is full, or the folder cannot be written to any more; files that were there are whole.
    """
    try:
        _replace(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())
        _replace(folder / PICTURE, plot.draw(report))
        _replace(folder / README, readme(report).encode())
    except OSError as error:
        raise Fp8Error(
            f"The report cannot be written to {str(folder)!r} ({error.strerror}); make room there, or give --out "
            "another folder."
        ) from error


def readme(report: Report) -> str:
    """Return the report as Markdown: the picture, and a table and a verdict for each section."""
    machine, data = report["machine"], report["data"]
    parts = ["# Demo report", f"![Training loss]({PICTURE})"]
    for section in sections(report).values():
        words = section["summary"]
        parts += [f"## {words['title']}", f"**{words['verdict'][0]}**", markdown_table(words)]
        parts.append("\n".join(f"- {sentence}" for sentence in words["verdict"][1:]))
    parts += [
        "## Where these numbers come from",
        f"Data: {data['path']}, {data['bytes']:,} bytes. Machine: "
        + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items())
        + ". Versions: "
        + ", ".join(f"{key} {value}" for key, value in report["versions"].items())
        + f". All numbers stand in [{REPORT}]({REPORT}).",
    ]
    return "\n\n".join(parts) + "\n"


def sections(report: Report) -> dict[str, Any]:
    """Return the parts of a report that a demo added, by name."""
    return {key: value for key, value in report.items() if key not in SHARED}


def markdown_table(words: Mapping[str, Any]) -> str:
    """Return a summary's table in Markdown: first column to the left, figures to the right."""
    head = [words["columns"], ["---", *["---:"] * (len(words["columns"]) - 1)]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *words["rows"]])


def plain_table(words: Mapping[str, Any]) -> str:
    """Return a summary's table in aligned columns for a terminal."""
    rows = [words["columns"], *words["rows"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
