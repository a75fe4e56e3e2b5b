"""Writes the golden vectors: `python -m tests.golden`."""

import json

from tests.golden import FILE, build

FILE.write_text(json.dumps(build(), indent=0) + "\n", encoding="utf-8")
