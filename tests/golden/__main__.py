"""Writes the golden vectors: `python -m tests.golden`."""

from tests.golden.cases import build
from tests.golden.store import FILE, dump

FILE.write_text(dump(build()), encoding="utf-8")
