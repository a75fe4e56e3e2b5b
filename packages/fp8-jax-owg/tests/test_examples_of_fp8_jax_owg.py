"""Every public function and class has an example in its docstring, and it runs."""

import doctest
import inspect

import pytest

import fp8_jax_owg

PUBLIC = [name for name in fp8_jax_owg.__all__ if not inspect.ismodule(getattr(fp8_jax_owg, name))]


@pytest.mark.parametrize("name", ["fp8_jax_owg", *PUBLIC])
def test_example_runs(name):
    value = getattr(fp8_jax_owg, name, fp8_jax_owg)
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
