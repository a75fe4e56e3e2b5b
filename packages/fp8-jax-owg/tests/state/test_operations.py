"""What a loss may do to its variables, in every framework: right, refused with a sentence, or for zeros NaN at once."""

import functools

import pytest

import jax_losses


@functools.cache
def made(name):
    return jax_losses.FRAMEWORKS[name]()


@pytest.mark.parametrize("framework", jax_losses.FRAMEWORKS)
@pytest.mark.parametrize("name", jax_losses.ROWS)
def test_operations_on_variables(framework, name):
    jax_losses.check(made(framework), name)
