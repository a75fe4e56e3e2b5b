"""What is private in JAX: it is there."""

from types import SimpleNamespace

import jax
import pytest

from fp8_common import Fp8UnsupportedError
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import compat


def test_this_jax_has_all_private_names():
    assert compat.PROBLEM is None, f"{compat.PROBLEM}. Adapt fp8_common/jax/compat.py to this JAX."


def test_a_missing_name_disables_kernels(monkeypatch):
    monkeypatch.setattr(compat, "PROBLEM", "jax 9 has moved a private name: x")
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    with pytest.raises(Fp8UnsupportedError, match="FP8_COMMON_BACKEND=triton, but jax 9 has moved"):
        kernels.selects_kernels()


def test_only_arrays_of_one_device_are_local():
    """What the partitioner spreads over devices is left to XLA."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    assert compat.is_local(SimpleNamespace(num_devices=1))
    assert not compat.is_local(SimpleNamespace(num_devices=8))
    assert compat.is_local(SimpleNamespace(mesh=mesh, manual_axes=frozenset("ab")))
    assert not compat.is_local(SimpleNamespace(mesh=mesh, manual_axes=frozenset("a")))
