"""The JAX functions have the names and signatures of the NumPy ones, and run under this project's JAX settings."""

import inspect

import jax
import pytest

import fp8_common
import fp8_common.jax as f8

NUMERICS = {f"fp8_common._reference.{name}" for name in ("quantize", "rounding", "scaling")}
SHARED = {name for name in fp8_common.__all__ if getattr(getattr(fp8_common, name), "__module__", None) in NUMERICS}
SHARED -= {"Quantized", "philox", "random_bits"}


def test_every_numpy_function_exists():
    assert set(f8.__all__) == SHARED | {"Quantized", "fake_quantize"}
    assert f8.Quantized is fp8_common.Quantized


@pytest.mark.parametrize("name", sorted(SHARED))
def test_parameters_and_defaults_agree(name):
    def parameters(module):
        found = inspect.signature(getattr(module, name)).parameters.values()
        return [(one.name, one.kind, None if one.name == "dtype" else one.default) for one in found]

    assert parameters(f8) == parameters(fp8_common)


def test_tests_run_with_strict_promotion_and_without_64_bits():
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert not jax.config.jax_enable_x64
