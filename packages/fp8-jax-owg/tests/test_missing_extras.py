"""What is not installed is said in one sentence that holds the line for pip."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(("part", "needed"), [("linen", "flax"), ("nnx", "flax"), ("optimizers", "optax")])
def test_a_part_says_which_extra_it_needs(monkeypatch, part, needed):
    for name in [name for name in sys.modules if name.startswith(f"fp8_jax_owg.{part}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"fp8_jax_owg.{part}")
    assert str(caught.value) == (
        f"fp8_jax_owg.{part} needs {needed}, which is not installed. Run: pip install 'fp8-jax-owg[{needed}]'"
    )
    assert caught.value.name == needed
