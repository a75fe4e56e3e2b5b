"""The choice between the extended dtype and public API: tried out, overridden, and falling back."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg import _compat as compat
from fp8_jax_owg import _dtype as dtype
from fp8_jax_owg import _mode as modes


@pytest.fixture
def fresh(monkeypatch):
    """Forget what was found out, before and after."""
    monkeypatch.delenv("FP8_JAX_OWG_MODE", raising=False)
    modes.find_problem.cache_clear()
    yield monkeypatch
    modes.find_problem.cache_clear()


def sum_rule(dtype, x, y):
    """What autodiff does with plain floats."""
    plain = [jax.lax.convert_element_type(one, dtype.float_dtype) for one in (x, y)]
    return jax.lax.convert_element_type(plain[0] + plain[1], dtype)


def test_this_jax_has_what_the_extended_dtype_needs():
    assert compat.PROBLEM is None, f"{compat.PROBLEM}. Adapt fp8_jax_owg/_compat.py to this JAX."
    assert modes.find_problem() is None, "JAX changed extended dtypes. Adapt compat.py and dtype.py."
    assert owg.get_mode() == "extended"


def test_the_trial_may_run_while_something_is_traced(fresh):
    assert jax.jit(lambda x: x + (1 if owg.get_mode() == "extended" else 2))(jnp.int32(0)) == 1


def test_a_rule_that_adds_is_found_out(fresh, caplog):
    fresh.setattr(dtype.MaxGradRules, "add", staticmethod(sum_rule))
    jax.clear_caches()
    with caplog.at_level(logging.WARNING):
        assert owg.get_mode() == "fan_out"
        assert owg.get_mode() == "fan_out"
    assert len(caplog.records) == 1
    assert "instead of 5" in caplog.text
    fresh.undo()
    jax.clear_caches()


def test_a_missing_rule_is_found_out(fresh):
    fresh.delattr(dtype.MaxGradRules, "zero")
    jax.clear_caches()
    assert owg.get_mode() == "fan_out"
    assert "zero" in modes.find_problem()
    fresh.undo()
    jax.clear_caches()


def test_a_moved_private_name_is_found_out(fresh):
    fresh.setattr(compat, "PROBLEM", "jax 9 has moved a private name: x")
    assert owg.get_mode() == "fan_out"
    with owg.use_mode("extended"), pytest.raises(Fp8UnsupportedError, match=r"has moved a private name: x.*fan_out"):
        owg.get_mode()


@pytest.mark.parametrize("name", ["extended", "fan_out"])
def test_the_environment_chooses(fresh, name):
    fresh.setenv("FP8_JAX_OWG_MODE", name)
    assert owg.get_mode() == name


def test_the_environment_is_checked(fresh):
    fresh.setenv("FP8_JAX_OWG_MODE", "max")
    with pytest.raises(Fp8Error, match="FP8_JAX_OWG_MODE must be one of auto, extended, fan_out, got 'max'"):
        owg.get_mode()


def test_a_choice_belongs_to_its_block_and_thread(fresh):
    other = []
    with owg.use_mode("fan_out"):
        with owg.use_mode("extended"):
            assert owg.get_mode() == "extended"
        assert owg.get_mode() == "fan_out"
        thread = threading.Thread(target=lambda: other.append(owg.get_mode()))
        thread.start()
        thread.join()
    assert other == ["extended"]
    assert owg.get_mode() == "extended"


def test_another_mode_is_refused():
    with pytest.raises(Fp8Error, match="mode must be one of extended, fan_out, got 'max'"), owg.use_mode("max"):
        pass
