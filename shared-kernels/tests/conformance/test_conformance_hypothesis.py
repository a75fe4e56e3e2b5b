"""Every implementation equals NumPy on drawn bits: values, scales, amax and histories.

Shapes are fixed, so that what is compiled is compiled once, for all operations together.
"""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import strategies
from conformance_implementations import IMPLEMENTATIONS, NUMPY, Implementation
from fp8_common import E8M0
from fp8_common.formats import DATA_FORMATS
from fp8_common.policy import HISTORY_ALGOS, MX_MODES
from fp8_common.presets import PRESETS
from fp8_common.testing import assert_same_bits
from fp8_common.testing.compare import as_numpy

SHAPE, TENSORS, WINDOW = (3, 150), 5, 3
POLICIES = {name: preset() for name, preset in PRESETS.items()}
INPUTS = st.tuples(
    strategies.arrays(shape=SHAPE),
    strategies.arrays(np.float16, SHAPE),
    strategies.arrays(shape=(SHAPE[0], 1)),
    strategies.arrays(shape=(TENSORS,)),
    strategies.arrays(shape=(TENSORS,)),
    strategies.arrays(shape=(WINDOW, TENSORS)),
)
"""float32 and float16 values, scales of rows, amax, previous scales, a window."""


def everything(lib: Implementation, x: Any, half: Any, scale: Any, amax: Any, prev: Any, window: Any) -> list[Any]:
    """Return (name, format of the codes or None, result) for every operation, every format and every preset."""
    f8, found = lib.f8, [("amax", None, lib.f8.amax(x)), ("amax of rows", None, lib.f8.amax(half, axis=-1))]
    for algo in HISTORY_ALGOS:
        rolled, largest = f8.update_history(window, amax, algo)
        found += [(f"window, {algo}", None, rolled), (f"largest, {algo}", None, largest)]
    for fmt in DATA_FORMATS:
        codes = f8.quantize(x, scale, fmt)
        found += [
            (f"encode {fmt}", fmt, f8.encode(half, fmt)),
            (f"quantize {fmt}", fmt, codes),
            (f"dequantize {fmt}", None, f8.dequantize(codes, scale, fmt)),
        ]
        found += [
            (f"scale {fmt} {name}", None, f8.amax_to_scale(amax, fmt, policy, prev))
            for name, policy in POLICIES.items()
        ]
        for name, (data, scales), form in [
            ("rows", f8.quantize_rowwise(half, fmt), None),
            ("1x128", f8.quantize_blockwise(x, fmt, (1, 128)), None),
            ("128x128", f8.quantize_blockwise(half, fmt, (128, 128)), None),
            *((f"MX {mode}", f8.quantize_mx(x, fmt, mode), E8M0) for mode in MX_MODES),
        ]:
            found += [(f"{name} {fmt}", fmt, data), (f"scales of {name} {fmt}", form, scales)]
    return found


def prepared(implementation: Implementation) -> Callable[[list[np.ndarray]], list[Any]]:
    """Return a function of the drawn arrays that gives the results alone, compiled where that is what is compared."""

    def results(arrays: list[tuple[Any, ...]]) -> list[Any]:
        return [result for _, _, result in everything(implementation, *arrays[0])]

    run = implementation.prepare(results)
    return lambda arrays: [as_numpy(one) for one in run([tuple(map(implementation.array, arrays))])]


SLOW = ("torch.compile", "jax eager")
"""Half a minute of compiling; compiled operation by operation, what "jax jit" compiles whole: with `--full`."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "implementation",
    [one for one in IMPLEMENTATIONS if not one.only_full and not one.partial],
    ids=lambda one: one.name.replace(" ", "-"),
)
def test_same_bits_as_numpy_on_any_bits(implementation: Implementation, full: bool) -> None:
    if implementation.name in SLOW and not full:
        pytest.skip("slow to compile: run it with --full")
    run = prepared(implementation)

    # the first example compiles
    @settings(max_examples=1000 if full else 25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(arrays=INPUTS)
    def check(arrays):
        for (name, fmt, want), got in zip(everything(NUMPY, *arrays), run(arrays), strict=True):
            assert_same_bits(got, as_numpy(want), fmt=fmt, name=f"{implementation.name}: {name}")

    check()
