"""Every public function and class has an example in its docstring, and it runs."""

import doctest
import inspect

import pytest

import fp8_jax_owg

EXAMPLES = {
    "CurrentScaling",
    "DelayedScaling",
    "Fp8Param",
    "OwgLog",
    "accumulate",
    "apply_updates",
    "fp8_all_gather",
    "fp8_conv_general_dilated",
    "fp8_dot_general",
    "fp8_einsum",
    "fp8_ragged_dot",
    "grad",
    "init_meta",
    "pmean",
    "psum",
    "report",
    "value_and_grad",
}
"""Names with an example, listed so that a deleted example fails its test."""


def test_every_public_function_and_class_is_listed():
    public = {name for name in fp8_jax_owg.__all__ if not inspect.ismodule(getattr(fp8_jax_owg, name))}
    assert public == EXAMPLES


@pytest.mark.parametrize("name", ["fp8_jax_owg", *sorted(EXAMPLES)])
def test_example_runs(name):
    value = getattr(fp8_jax_owg, name, fp8_jax_owg)
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
