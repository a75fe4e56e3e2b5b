"""Plugin discovery: described, broken and mismatched plugins."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from fp8_common import Fp8UnsupportedError, __version__
from fp8_common.hardware import Device, PathStatus
from fp8_common.plugin import GROUP, Machine, PluginInfo, check_version, discover, version_conflict

MACHINE = Machine(system="s", python="3", cores=1, devices=(Device(kind="cpu", name="c"),), versions={})
PATH = PathStatus(name="all-gather", status="native", why="because.")


def info(name="my-plugin", version="3.1"):
    return PluginInfo(name=name, version=version, summary="Does things.", paths=(PATH,))


def raises(error):
    def describe(machine):
        raise error

    return describe


CONFLICT = (
    f"fp8-torch-fsdp 9.0 needs fp8-common 9.0, but fp8-common {__version__} is installed. Install one version of both: "
    "python -m pip install fp8-torch-fsdp==9.0 fp8-common==9.0"
)
# what the entry point leads to, the information and the problem that are reported
PLUGINS = {
    "an object is taken as it is": (info(), info(), None),
    "a function is told the machine": (lambda machine: info(machine.system), info("s"), None),
    "absent": (None, None, "ModuleNotFoundError: No module named 'plugin_absent'"),
    "fails": (raises(RuntimeError("no CUDA\nmore")), None, "RuntimeError: no CUDA"),
    "lies": (lambda machine: {"name": "x"}, None, "Fp8Error: it must return a PluginInfo, got dict"),
    "of another version": (info("fp8-torch-fsdp", "9.0"), info("fp8-torch-fsdp", "9.0"), CONFLICT),
}


@pytest.fixture
def entry(monkeypatch):
    """Return a function that makes an entry point for a row of `PLUGINS`."""

    def make(name):
        target, module = PLUGINS[name][0], f"plugin_{name.replace(' ', '_')}"
        if target is not None:
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(describe=target))
        return EntryPoint(name, f"{module}:describe", GROUP)

    return make


def test_every_plugin_is_reported_and_a_broken_one_does_not_hide_the_others(entry):
    reports = discover(MACHINE, [entry(name) for name in PLUGINS])
    assert [report.entry.partition(" = ")[0] for report in reports] == sorted(PLUGINS)
    assert [(r.info, r.problem) for r in reports] == [PLUGINS[name][1:] for name in sorted(PLUGINS)]


def test_the_version_is_the_reason_when_a_mismatched_sibling_cannot_be_loaded(entry, monkeypatch):
    dist = types.SimpleNamespace(name="fp8-torch-fsdp", version="9.0")
    monkeypatch.setattr(EntryPoint, "dist", dist)
    (report,) = discover(MACHINE, [entry("fails")])
    assert report.problem == CONFLICT


def test_versions():
    assert version_conflict("fp8-jax-owg", __version__) is None
    assert version_conflict("someone-elses-plugin", "9.0") is None
    check_version("fp8-te-init", __version__)
    with pytest.raises(Fp8UnsupportedError, match=r"fp8-te-init 0\.0\.9 needs fp8-common 0\.0\.9"):
        check_version("fp8-te-init", "0.0.9")


def test_installed_plugins_are_looked_up_in_their_group(monkeypatch, entry):
    found = {"fp8.plugins": [entry("an object is taken as it is")]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found[group])
    assert [report.info for report in discover(MACHINE)] == [info()]
