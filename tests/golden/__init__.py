"""Golden vectors: committed inputs and results of every numerical rule, which show when a rule changes.

`load` returns the committed vectors; `build` computes them with NumPy; `python -m tests.golden` writes them. Other
implementations run the inputs and compare with the results (`fp8_common.testing.assert_same_bits`).
"""

from tests.golden.cases import Case, build
from tests.golden.store import compare, load

__all__ = ["Case", "build", "compare", "load"]
