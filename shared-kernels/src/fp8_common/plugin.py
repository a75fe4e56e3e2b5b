"""Plugin support: reports for `fp8 doctor`, version checks and extras.

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
    """A plugin's report on a machine.

    Attributes:
        name: Name of its distribution.
        version: Its version.
        summary: Purpose of the plugin, one sentence.
        paths: Paths of the plugin here, with reasons.
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
        info: The plugin's report; None if it failed.
        problem: The problem, with the remedy; None without one.
    """

    entry: str
    info: PluginInfo | None = None
    problem: str | None = None


def discover(
    machine: Machine, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> tuple[PluginReport, ...]:
    """Return the reports of all installed plugins, sorted by entry point.

    Args:
        machine: Facts about this machine, passed to the plugins.
        entry_points: The entry points to load; None finds the installed ones.
    """
    entries = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    # Sorted, because the order of entry points follows the folders on the path.
    return tuple(_ask(entry, machine) for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)))


def version_conflict(name: str, version: str) -> str | None:
    """Return why a plugin does not fit fp8-common, or None.

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
    """Raise with the missing extra if an import here fails.

    Args:
        requirement: What to install.
        module: The module that needs the extra.

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
    """Raise if plugin and fp8-common versions differ.

    Plugins call it when they are imported.

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
