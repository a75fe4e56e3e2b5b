"""Every implementation equals NumPy, bit for bit, for every operation, granularity and format."""

from typing import Any

import numpy as np
import pytest

from conformance_implementations import IMPLEMENTATIONS, NUMPY, Implementation
from conformance_inputs import SEED
from conformance_table import ROWS, Call
from fp8_common.testing import assert_same_bits
from fp8_common.testing.compare import as_numpy

WITHOUT_A_KERNEL = {
    "encode_stochastic": "the kernel draws its own bits",
    "quantize_stochastic": "the kernel draws its own bits",
    "reciprocal": "kernels divide on the way, none does only that",
}
"""Why an operation is not compared with the kernels; shared-kernels/tests/interpreter tests stochastic rounding."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = [one for one in IMPLEMENTATIONS if metafunc.config.getoption("full") or not one.only_full]
    metafunc.parametrize("implementation", chosen, ids=lambda item: item.name.replace(" ", "-"))


@pytest.mark.parametrize("operation", ROWS)
def test_same_bits_as_numpy(implementation: Implementation, operation: str, full: bool) -> None:
    if implementation.partial and operation in WITHOUT_A_KERNEL:
        pytest.skip(f"{operation}: {WITHOUT_A_KERNEL[operation]}")
    calls = list(ROWS[operation](full))[:: 1 if full else implementation.every]
    compared, failures = 0, []
    found = results(implementation, calls)
    defined = [number for number, got in enumerate(found) if got is not None]
    assert implementation.partial or len(defined) == len(calls)
    wanted = results(NUMPY, [calls[number] for number in defined])
    for place, want in zip(defined, wanted, strict=True):
        call, got = calls[place], found[place]
        for number, (one, other, fmt) in enumerate(zip(got, want, call.formats, strict=True)):
            compared += other.size
            name = f"{implementation.name}: {operation}, {call}, result {number}"
            try:
                source = call.arrays[0] if call.arrays[0].shape == other.shape else None
                assert_same_bits(one, other, fmt=fmt, source=source, seed=SEED, name=name)
            except AssertionError as failure:
                failures.append(str(failure))
    assert compared > 0
    if failures:
        pytest.fail(f"{len(failures)} results differ; the first:\n" + "\n".join(failures[:3]), pytrace=False)


def results(implementation: Implementation, calls: list[Call]) -> list[tuple[np.ndarray, ...] | None]:
    """Run all calls as one function (one graph, where the implementation compiles) and return NumPy arrays.

    None stands for what a partial implementation does not define.
    """
    functions = [call.bound(implementation) for call in calls]

    def everything(inputs: list[tuple[Any, ...]]) -> list[Any]:
        return [function(*arrays) for function, arrays in zip(functions, inputs, strict=True)]

    inputs = [tuple(implementation.array(array) for array in call.arrays) for call in calls]
    with implementation.active():
        found = implementation.prepare(everything)(inputs)
    return [None if one is None else tuple(map(as_numpy, one if isinstance(one, tuple) else (one,))) for one in found]
