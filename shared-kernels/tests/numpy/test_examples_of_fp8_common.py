"""Examples in docstrings of the package and of its public names run."""

import doctest

import pytest

import fp8_common


def documented():
    yield fp8_common
    for name in fp8_common.__all__:
        value = getattr(fp8_common, name)
        if ">>>" in (getattr(value, "__doc__", None) or ""):
            yield value


@pytest.mark.parametrize("value", list(documented()), ids=lambda value: value.__name__)
def test_example_runs(value):
    finder = doctest.DocTestFinder(recurse=False)
    for example in finder.find(value, value.__name__, globs={}):
        assert example.examples
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
