"""What is not installed is said in one sentence that holds the line for pip."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "part", "needed"),
    [
        ("fp8_common.torch", "fp8_common.torch", "torch"),
        ("fp8_common.torch.casts", "fp8_common.torch", "torch"),
        ("fp8_common.jax", "fp8_common.jax", "jax"),
    ],
)
def test_a_module_names_its_missing_extra(monkeypatch, module, part, needed):
    for name in [name for name in sys.modules if name.startswith(("fp8_common.torch", "fp8_common.jax"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    assert caught.value.name == needed
    assert str(caught.value) == (
        f"{part} needs {needed}, which is not installed. Run: pip install 'fp8-common[{needed}]'"
    )
