"""Examples in docstrings of the package and of its public names run."""

import doctest

import pytest

import fp8_te_init

EXAMPLES = (
    "LinearConfig",
    "MasterOptimizer",
    "MissingInitError",
    "PrimaryFloat8Linear",
    "PrimaryFloat8Weight",
    "StaleInitError",
    "broadcast_weights_",
    "convert_linear",
    "export_fp32_state_dict",
    "fp8_model_init",
    "memory_report",
    "quantize_master_weights",
    "rescale_",
    "seed_masters",
)
"""Names whose docstrings have an example; a deleted example fails."""


def test_every_public_name_has_an_example():
    assert sorted(fp8_te_init.__all__) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", ["the package", *EXAMPLES])
def test_example_runs(name):
    value = fp8_te_init if name == "the package" else getattr(fp8_te_init, name)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(value, name, globs={})
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
