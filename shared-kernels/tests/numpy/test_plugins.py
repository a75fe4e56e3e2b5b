"""Plugin discovery: described, broken and mismatched plugins."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from fp8_common import Fp8UnsupportedError, __version__
from fp8_common.hardware import Device, Path
from fp8_common.plugin import GROUP, Machine, PluginInfo, check_version, discover, version_conflict

MACHINE = Machine(system="s", python="3", cores=1, devices=(Device(kind="cpu", name="c"),), versions={})
PATH = Path(name="all-gather", status="native", why="because.")


def info(name="my-plugin", version="3.1"):
    return PluginInfo(name=name, version=version, summary="Does things.", paths=(PATH,))


@pytest.fixture
def entry(monkeypatch):
    """Return a function that makes an entry point for an object, or for a module that is not there."""

    def make(name, target=None, module=None):
        if module is None:
            module = f"plugin_{name}"
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(describe=target))
        return EntryPoint(name, f"{module}:describe", GROUP)

    return make


def test_functions_are_told_the_machine_and_objects_are_taken_as_they_are(entry):
    told = []

    def describe(machine):
        told.append(machine)
        return info()

    reports = discover(MACHINE, [entry("b", describe), entry("a", info(name="other"))])
    assert [report.entry for report in reports] == ["a = plugin_a:describe", "b = plugin_b:describe"]
    assert [report.info.name for report in reports] == ["other", "my-plugin"]
    assert [report.problem for report in reports] == [None, None]
    assert told == [MACHINE]


def raises(error):
    def describe(machine):
        raise error

    return describe


def test_broken_plugins_are_reported_and_do_not_hide_the_others(entry):
    entries = [
        entry("absent", module="no_such_module"),
        entry("fails", raises(RuntimeError("no CUDA\nmore"))),
        entry("lies", lambda machine: {"name": "x"}),
        entry("works", info()),
    ]
    absent, fails, lies, works = discover(MACHINE, entries)
    assert absent.problem == "ModuleNotFoundError: No module named 'no_such_module'"
    assert fails.problem == "RuntimeError: no CUDA"
    assert lies.problem == "Fp8Error: it must give a PluginInfo, got dict"
    assert (absent.info, fails.info, lies.info) == (None, None, None)
    assert works.info == info()


def test_a_sibling_of_another_version_is_reported_with_the_remedy(entry):
    (report,) = discover(MACHINE, [entry("torch", info("fp8-torch-fsdp", "9.0"))])
    assert report.info is not None
    assert report.problem == (
        f"fp8-torch-fsdp 9.0 needs fp8-common 9.0, but fp8-common {__version__} is installed. Install one version of "
        "both: python -m pip install fp8-torch-fsdp==9.0 fp8-common==9.0"
    )


def test_the_version_is_the_reason_when_a_mismatched_sibling_cannot_be_loaded(entry, monkeypatch):
    broken = entry("torch", raises(ImportError("cannot import name 'new'")))
    dist = types.SimpleNamespace(name="fp8-torch-fsdp", version="9.0")
    monkeypatch.setattr(EntryPoint, "dist", dist)
    (report,) = discover(MACHINE, [broken])
    assert report.problem.startswith("fp8-torch-fsdp 9.0 needs fp8-common 9.0")


def test_versions():
    assert version_conflict("fp8-jax-owg", __version__) is None
    assert version_conflict("someone-elses-plugin", "9.0") is None
    check_version("fp8-te-init", __version__)
    with pytest.raises(Fp8UnsupportedError, match=r"fp8-te-init 0\.0\.9 needs fp8-common 0\.0\.9"):
        check_version("fp8-te-init", "0.0.9")


def test_installed_plugins_are_looked_up_in_their_group(monkeypatch, entry):
    asked = []
    found = [entry("one", info())]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: asked.append(group) or found)
    assert [report.info for report in discover(MACHINE)] == [info()]
    assert asked == ["fp8.plugins"]
