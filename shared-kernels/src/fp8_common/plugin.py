"""What plugins need beside the public names: how a plugin tells of itself to `fp8 doctor`, and shared settings.

The parts that know a framework are the modules of `fp8_common.torch` and `fp8_common.jax` without an underscore.
Nothing else of fp8_common is for plugins: modules and names with an underscore change without notice.

Plugins are found through the entry points of the group `fp8.plugins`. An entry point names a function
`describe(machine: Machine) -> PluginInfo`, or a ready `PluginInfo`. It must be quick and must not need a GPU. In a
plugin's pyproject.toml:

    [project.entry-points."fp8.plugins"]
    torch-fsdp = "fp8_torch_fsdp._plugin:describe"

A plugin that fails is reported, not raised: one broken plugin must not hide the others.
"""

import dataclasses
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fp8_common import __version__
from fp8_common._machine import Machine, first_line
from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.hardware import PathStatus
from fp8_common.policy import Record

__all__ = ["Machine", "PluginInfo", "Record", "check_version", "extra"]


_log = logging.getLogger(__name__)

GROUP = "fp8.plugins"
FAMILY = ("fp8-torch-fsdp", "fp8-jax-owg", "fp8-te-init")
"""Plugins that are released together with fp8-common, in one version."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """What a plugin says about itself on a machine.

    Attributes:
        name: Name of its distribution.
        version: Its version.
        summary: One sentence: what it is for.
        paths: What it will do here and why.
        certify: "module:function" of its rows of `fp8 certify`: called with properties, it yields names and functions
            that return a certificate.
    """

    name: str
    version: str
    summary: str
    paths: tuple[PathStatus, ...] = ()
    certify: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginReport:
    """The result of asking one entry point.

    Attributes:
        entry: Name and target of the entry point.
        info: What the plugin said; None if it failed.
        problem: What is wrong, with the remedy; None if nothing is.
    """

    entry: str
    info: PluginInfo | None = None
    problem: str | None = None


def discover(
    machine: Machine, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> tuple[PluginReport, ...]:
    """Ask every installed plugin to describe itself; sorted by entry point.

    Args:
        machine: What the plugins are told about this machine.
        entry_points: The entry points to ask; None finds the installed ones.
    """
    found = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    # Sorted, because the order of entry points is that of the folders on the path.
    return tuple(_ask(entry, machine) for entry in sorted(found, key=lambda entry: (entry.name, entry.value)))


def version_conflict(name: str, version: str) -> str | None:
    """Say why a plugin of this family does not fit the installed fp8-common; None if it does.

    Args:
        name: Name of the plugin's distribution; names outside the family always fit.
        version: Its version.
    """
    if name not in FAMILY or version == __version__:
        return None
    return (
        f"{name} {version} needs fp8-common {version}, but fp8-common {__version__} is installed. "
        f"Install one version of both: python -m pip install {name}=={version} fp8-common=={version}"
    )


@contextmanager
def extra(requirement: str, module: str) -> Iterator[None]:
    """Say which extra is missing if an import in the block of this context fails.

    Args:
        requirement: What to install.
        module: What needs it.

    Raises:
        ModuleNotFoundError: Something is not installed, with the line for pip.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{module} needs {error.name}, which is not installed. Run: pip install '{requirement}'", name=error.name
        ) from None


def check_version(name: str, version: str) -> None:
    """Refuse to run a plugin beside another version of fp8-common; plugins call it when they are imported.

    Raises:
        Fp8UnsupportedError: The versions differ; the message names both and the command that installs equal ones.
    """
    conflict = version_conflict(name, version)
    if conflict:
        raise Fp8UnsupportedError(conflict)


def _ask(entry: importlib.metadata.EntryPoint, machine: Machine) -> PluginReport:
    label = f"{entry.name} = {entry.value}"
    # Compared before loading: a plugin of another version is likely to fail with an error that hides the reason.
    conflict = version_conflict(entry.dist.name, entry.dist.version) if entry.dist else None
    try:
        target = entry.load()
        info = target(machine) if callable(target) else target
        if not isinstance(info, PluginInfo):
            raise Fp8Error(f"it must give a PluginInfo, got {type(info).__name__}")
    except Exception as error:  # a plugin may raise anything; the others must still be heard
        _log.info("plugin %s failed", label, exc_info=True)
        return PluginReport(entry=label, problem=conflict or f"{type(error).__name__}: {first_line(error)}")
    return PluginReport(entry=label, info=info, problem=conflict or version_conflict(info.name, info.version))
