"""What is not installed is said in one sentence that holds the line for pip."""

import importlib
import sys

import pytest


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides packages from imports, and what was imported of fp8_common with them."""

    def hide(*names):
        for name in list(sys.modules):
            if name.startswith(("fp8_common.torch", "fp8_common.jax")):
                monkeypatch.delitem(sys.modules, name)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.mark.parametrize(
    ("module", "needed", "extra"),
    [
        ("fp8_common.torch", "torch", "torch"),
        ("fp8_common.torch.casts", "torch", "torch"),
        ("fp8_common.jax", "jax", "jax"),
    ],
)
def test_a_module_says_which_extra_it_needs(without, module, needed, extra):
    without(needed)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    part = "fp8_common.torch" if needed == "torch" else module
    assert str(caught.value) == (
        f"{part} needs {needed}, which is not installed. Run: pip install 'fp8-common[{extra}]'"
    )
    assert caught.value.name == needed
