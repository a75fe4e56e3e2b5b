"""The package and each public name have an example in their docstring, and it runs."""

import doctest

import pytest

import fp8_te_init


@pytest.mark.parametrize("name", ["the package", *fp8_te_init.__all__])
def test_example_runs(name):
    value = fp8_te_init if name == "the package" else getattr(fp8_te_init, name)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(value, name, globs={})
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
