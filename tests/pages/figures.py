"""Figures of measurements in the text of pages, and the files of `benchmarks/results` that they come from.

A comment before a paragraph names the file and says how each figure follows from it:

    <!-- figures of benchmarks/results/te_init.json
    192 MiB = of["memory"]["cpu"]["codes"] / 2**20
    -->

`of` is the file's content; the functions of `helpers` are known too. `<!-- not kept: 60 MiB (watched once) -->` is for
figures that no file holds, with the reason. Tables and parts that are rendered from data have tests of their own.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.helpers.repository import ROOT

UNITS = "µs|ms|ns|s|seconds|minutes|times|%|MiB|KiB|GiB|GB|MB|kB|dB|tokens/s|TB/s"
NUMBER = re.compile(rf"(?<![\w.^-])[+-]?\d[\d,]*(?:\.\d+)?(?:\s(?:{UNITS})(?!\w)|x(?![\w ]*\d))")
CLAIMS = re.compile(r"^<!-- figures of (\S+)\n(.*?)^-->\n", re.MULTILINE | re.DOTALL)
NOT_KEPT = re.compile(r"^<!-- not kept: (.*?) -->\n", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
PART = re.compile(r"^( *)<!-- ([a-z][\w -]*): begin -->.*?^\1<!-- \2: end -->$", re.MULTILINE | re.DOTALL)


class Claim(NamedTuple):
    """One figure: its text, the file, how it follows, and the paragraph that must hold it."""

    text: str
    file: str
    expression: str
    paragraph: str


def claims(page: str) -> Iterator[Claim]:
    """Yield every figure that a page says the origin of."""
    for match in CLAIMS.finditer(page):
        paragraph = " ".join(next(text_after(page[match.end() :])).split())
        for line in match[2].splitlines():
            text, _, expression = line.partition(" = ")
            yield Claim(text, match[1], expression, paragraph)


def text_after(rest: str) -> Iterator[str]:
    """Yield the paragraphs that follow, without comments."""
    yield from re.split(r"\n\s*\n", NOT_KEPT.sub("", CLAIMS.sub("", rest)).lstrip("\n"))


def is_rounded(text: str, value: float) -> bool:
    """Whether a text is a value, rounded to the digits that it has."""
    number = re.match(r"[+-]?[\d,]+(?:\.\d+)?", text)
    if number is None:
        return False
    digits = len(number[0].partition(".")[2])
    return abs(float(number[0].replace(",", "")) - value) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def value_of(claim: Claim) -> float:
    """Return what the claim's expression gives with the content of its file."""
    content = json.loads((ROOT / claim.file).read_text())
    return eval(claim.expression, {"__builtins__": {}}, {"of": content, **helpers(content)})


def helpers(of: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions that expressions may call besides Python's operators."""

    def hooks(implementation: str, ranks: int) -> float:
        rows = (row for row in of["worlds"] if row["implementation"] == implementation and row["world"] == ranks)
        return next(rows)["hook_seconds_per_weight"]

    def moved(rate: str, source: str) -> float:
        return of["dead_zone"]["runs"][rate][source]["flipped_after_10"]["mean"]

    def apart(way: str) -> list[float]:
        runs = {name.split("/")[2]: run["val_loss"] for name, run in of["runs"].items() if f"te-init/{way}/" in name}
        return [loss / of["runs"][f"fp8-te-init/float32/{seed}"]["val_loss"] - 1 for seed, loss in runs.items()]

    return {"hooks": hooks, "moved": moved, "apart": apart, "max": max, "min": min, **vars_of_statistics()}


def vars_of_statistics() -> dict[str, Callable[..., float]]:
    """Return the functions of `statistics` that figures use."""
    return {"fmean": statistics.fmean, "stdev": statistics.stdev, "median": statistics.median}


def without_origin(page: str) -> list[str]:
    """Return the figures with a unit in the text of a page that no comment accounts for."""
    accounted = " ".join([claim.text for claim in claims(page)] + NOT_KEPT.findall(page))
    text = PART.sub("", FENCE.sub("", NOT_KEPT.sub("", CLAIMS.sub("", page))))
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("|"))
    found = NUMBER.findall(" ".join(" ".join(lines).split()))
    return [number for number in found if number not in accounted]
