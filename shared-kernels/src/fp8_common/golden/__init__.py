"""Golden vectors: committed inputs and results of every numerical rule, which show when a rule changes.

`load` returns the committed vectors; `build` computes them with NumPy; `python -m fp8_common.golden` writes
them and `python -m fp8_common.golden --check` compares. Other implementations run the inputs and compare with
the results (`fp8_common.testing.assert_same_bits`).
"""

from fp8_common.golden.cases import Case, build
from fp8_common.golden.store import compare, load

__all__ = ["Case", "build", "compare", "load"]
