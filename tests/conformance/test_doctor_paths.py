"""`fp8 doctor`: what each plugin says of its products follows what its layers do, on every kind of device."""

import importlib

import pytest

from fp8_common import RECIPES, Fp8Error
from fp8_common.hardware import OWN_GROUPED, Device, matmul_path
from fp8_common.plugin import Machine

CPU = Device(kind="cpu", name="c")
PLUGINS = ("fp8_torch_fsdp", "fp8_te_init", "fp8_jax_owg")
DEVICES = {
    "cpu": CPU,
    "sm_90": Device(kind="nvidia", name="H100", capability=(9, 0), cuda=(12, 9)),
    "sm_100": Device(kind="nvidia", name="B200", capability=(10, 0), cuda=(13, 0)),
    "gfx942": Device(kind="amd", name="MI300X", arch="gfx942"),
}


def rows(plugin, device):
    pytest.importorskip(plugin)
    machine = Machine(system="s", python="3", cores=1, devices=(CPU, device), versions={})
    info = importlib.import_module(f"{plugin}._plugin").describe(machine)
    return {path.name: path for path in info.paths}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_recipe_has_a_row_and_rows_of_matmuls_are_those_of_the_device(plugin, device):
    said = rows(plugin, DEVICES[device])
    assert {recipe.input.granularity for recipe in RECIPES.values()} <= said.keys()
    for name in ("tensorwise", "rowwise"):
        assert said[name] == matmul_path(DEVICES[device], name)
    is_native = said["blockwise_1x128"].status == "native"
    assert is_native == (device == "sm_90" and plugin != "fp8_jax_owg")
    assert plugin != "fp8_jax_owg" or said["blockwise_1x128"].status == "unavailable"


def test_the_plugin_says_what_multiplies_groups_of_rows_and_why(monkeypatch):
    said = {device: rows("fp8_torch_fsdp", DEVICES[device])["groups of rows"] for device in DEVICES}
    assert {device: path.status for device, path in said.items()} == {
        "cpu": "emulated", "sm_90": "native", "sm_100": "emulated", "gfx942": "emulated",
    }  # fmt: skip
    assert (
        "no own kernel was measured to be 1.15 times as fast, so the library multiplies all shapes" in said["sm_90"].why
    )
    assert "decoded and multiplied by torch.nn.functional.grouped_mm" in said["sm_100"].why
    monkeypatch.setitem(OWN_GROUPED, ("rows", 4096, 4096), 500)
    assert "own kernels multiply 1 shapes" in rows("fp8_torch_fsdp", DEVICES["sm_90"])["groups of rows"].why


def test_jax_rejects_what_it_calls_unavailable():
    owg = pytest.importorskip("fp8_jax_owg")
    jnp = pytest.importorskip("jax.numpy")
    x, dims = jnp.ones((128, 128)), (((1,), (0,)), ((), ()))
    said = rows("fp8_jax_owg", CPU)
    for name, recipe in RECIPES.items():
        if said[recipe.input.granularity].status == "unavailable":
            with pytest.raises(Fp8Error, match="Layers of fp8_jax_owg do not support recipe"):
                owg.fp8_dot_general(x, x, dims, scaling=name)
