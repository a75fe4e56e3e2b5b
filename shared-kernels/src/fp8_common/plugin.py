"""Plugin support: reports for `fp8 doctor`, version checks and extras.

Plugins may also use all modules of fp8_common without an underscore, including those of `fp8_common.torch`,
`fp8_common.torch_layers` and `fp8_common.jax`. Modules and names with an underscore change without notice.

Plugins are discovered through entry points of the group `fp8.plugins`. An entry point is a function
`describe(machine: Machine) -> PluginInfo`, or a `PluginInfo`. The function must be fast and must not need a GPU. In a
plugin's pyproject.toml:

    [project.entry-points."fp8.plugins"]
    torch-fsdp = "fp8_torch_fsdp._plugin:describe"

A failing plugin is reported and does not raise, so that it does not hide the others.
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
"""Plugins that are released together with fp8-common, in the same version."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """A plugin's report on a machine.

    Attributes:
        name: Name of the plugin's distribution.
        version: Version of the distribution.
        summary: Purpose of the plugin, one sentence.
        paths: Status of the plugin's paths on this machine.
        certify: "module:function" that yields the rows of `fp8 certify`. The function is called with the properties to
            test, and yields pairs of a name and a function that returns a certificate.
    """

    name: str
    version: str
    summary: str
    paths: tuple[PathStatus, ...] = ()
    certify: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginReport:
    """Result of loading one entry point.

    Attributes:
        entry: Name and target of the entry point.
        info: Report of the plugin; None if it failed.
        problem: Problem and remedy; None if there is no problem.
    """

    entry: str
    info: PluginInfo | None = None
    problem: str | None = None


def discover(
    machine: Machine, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> tuple[PluginReport, ...]:
    """Return the reports of all installed plugins, sorted by entry point.

    Args:
        machine: Machine to report on, passed to the plugins.
        entry_points: Entry points to load; None loads the installed ones.
    """
    entries = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    # Sorted, because the order of entry points depends on the order of folders in `sys.path`.
    return tuple(_report_of(entry, machine) for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)))


def version_conflict(name: str, version: str) -> str | None:
    """Return the conflict between the versions of a plugin and fp8-common.

    Args:
        name: Name of the plugin's distribution.
        version: Version of the distribution.

    Returns:
        Problem and remedy; None if the versions are equal or the plugin is not in `FAMILY`.
    """
    if name not in FAMILY or version == __version__:
        return None
    return (
        f"{name} {version} needs fp8-common {version}, but fp8-common {__version__} is installed. "
        f"Install one version of both: python -m pip install {name}=={version} fp8-common=={version}"
    )


@contextmanager
def extra(requirement: str, module: str) -> Iterator[None]:
    """Name the extra to install if an import in this context fails.

    Args:
        requirement: Requirement to install, e.g. "fp8-common[torch]".
        module: Name of the module that needs the extra.

    Raises:
        ModuleNotFoundError: If an import fails; the message has the command for pip.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{module} needs {error.name}, which is not installed. Run: pip install '{requirement}'", name=error.name
        ) from None


def check_version(name: str, version: str) -> None:
    """Raise if the versions of a plugin and fp8-common differ.

    Plugins call it when they are imported.

    Raises:
        Fp8UnsupportedError: If the versions differ. The message has both, and a command that installs equal ones.
    """
    conflict = version_conflict(name, version)
    if conflict:
        raise Fp8UnsupportedError(conflict)


def _report_of(entry: importlib.metadata.EntryPoint, machine: Machine) -> PluginReport:
    label = f"{entry.name} = {entry.value}"
    # Versions are compared before loading: a plugin of another version may fail with an error that hides the reason.
    conflict = version_conflict(entry.dist.name, entry.dist.version) if entry.dist else None
    try:
        target = entry.load()
        info = target(machine) if callable(target) else target
        if not isinstance(info, PluginInfo):
            raise Fp8Error(f"it must return a PluginInfo, got {type(info).__name__}")
    except Exception as error:  # a plugin may raise any error; the others are still reported
        _log.info("plugin %s failed", label, exc_info=True)
        return PluginReport(entry=label, problem=conflict or f"{type(error).__name__}: {first_line(error)}")
    return PluginReport(entry=label, info=info, problem=conflict or version_conflict(info.name, info.version))
