"""The `fp8` command.

- `fp8 doctor` reports how this machine runs FP8.
- `fp8 advise` estimates whether FP8 makes the training of a model faster.
- `fp8 certify` tests which bitwise properties the numbers of recipes, or of a model, have.
- `fp8 watch` shows the log of a run.

Exit codes: 0 on success; 1 if `fp8 doctor` finds a broken plugin, `fp8 watch --once` shows a layer that needs action,
or a required package is not installed; 2 on bad input or an output that cannot be written, with one sentence on stderr.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fp8_common import __version__, advise
from fp8_common._env import Backend, backend
from fp8_common._machine import (
    Machine,
    detect,
    entry_of,
    gpu_entry,
    gpu_named,
    link_note,
    load_status,
    status_rows,
)
from fp8_common.errors import Fp8Error
from fp8_common.hardware import GATHER, Device, PathStatus, cast_path, matmul_path, native_formats
from fp8_common.monitoring.watch import watch
from fp8_common.plugin import PluginReport, discover
from fp8_common.recipe import GRANULARITIES
from fp8_common.testing.certify import PROPERTIES, check, engines, explanations, from_file, rows, table
from fp8_common.text_table import aligned

READER_GONE = 128 + 13
"""Exit status that shells report for a program ended by SIGPIPE."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one sentence with a suggestion.

    `argparse.ArgumentParser` prints the usage instead.

    Attributes:
        options: Options of all commands, including "--".
    """

    options: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        problem, _, choices = message.partition(" (choose from")
        known = [*self.options, *re.findall(r"[\w-]+", choices)]
        # Messages of argparse end with the words that the user wrote.
        given = problem.partition(": ")[2].replace("invalid choice:", "").replace("'", "").split()
        near = [match for word in given for match in difflib.get_close_matches(word.partition("=")[0], known, 1)]
        hint = f" Did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}.{hint} See {self.prog} --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fp8` command and return its exit code.

    Args:
        argv: Arguments without the program's name; None reads `sys.argv`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["fp8", *(argument for argument in arguments[:1] if not argument.startswith("-"))])
    try:
        try:
            options = _parser().parse_args(arguments or ["--help"])
            return options.run(options)
        finally:
            sys.stdout.flush()  # now, because an error at the end of the interpreter prints a traceback
    except BrokenPipeError:  # `fp8 doctor | head -1`: the reader has closed the pipe
        _discard_output()
        return READER_GONE
    except (Fp8Error, ModuleNotFoundError) as error:  # a missing extra is named with the command that installs it
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    except OSError as error:
        _discard_output()
        sys.stderr.write(f"{name}: the output cannot be written ({error.strerror or error}).\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fp8", description="Report how this machine runs FP8, and whether FP8 pays for a model.")
    parser.add_argument("--version", action="version", version=f"fp8-common {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="report how this machine, its frameworks and plugins run FP8, and why")
    doctor.add_argument("--gpu", metavar="NAME", help='report on another GPU, such as "RTX 4090" or H200')
    doctor.set_defaults(run=_doctor)
    advisor = commands.add_parser("advise", help="recommend a configuration for a model, from a modelled step")
    advisor.set_defaults(run=_advise)
    certifier = commands.add_parser("certify", help="test bitwise properties of all installed recipes, or of a model")
    certifier.add_argument(
        "target", nargs="?", metavar="FILE.py:factory", help="a function that returns (model, inputs)"
    )
    certifier.add_argument(
        "--properties", nargs="+", metavar="PROPERTY", help=f"some of {', '.join(PROPERTIES)} (default all)"
    )
    certifier.set_defaults(run=_certify)
    watcher = commands.add_parser("watch", help="show the state of a run's FP8 layers, live, from its log")
    watcher.add_argument("path", metavar="RUN", help="the log, or the folder that holds it as fp8.jsonl")
    watcher.add_argument(
        "--once", action="store_true", help="print the newest step and exit, with 1 if a layer needs action"
    )
    watcher.set_defaults(run=lambda options: watch(options.path, once=options.once))
    for command in (doctor, advisor, certifier):
        command.add_argument("--json", action="store_true", help="write JSON")
    add, job = advisor.add_argument, advise.Job(shape=advise.SHAPES["llama3-8b"])
    add("--model", default="llama3-8b", help="a hub name, or the config.json of a decoder (default %(default)s)")
    add("--ranks", type=int, default=job.ranks, help="devices; the model is sharded over all (default %(default)s)")
    add("--device", choices=advise.ACCELERATORS, default="h100", help="kind of device (default %(default)s)")
    add("--links", choices=advise.LINKS, default="infiniband-400", help="network (default %(default)s)")
    add("--tokens", type=int, default=job.tokens, help="tokens per micro-batch and device (default %(default)s)")
    add("--sequence", type=int, help=f"length of a sequence (default {advise.SEQUENCE}, or --tokens if that is less)")
    add("--micro-batches", type=int, default=1, help="micro-batches per optimizer step (default %(default)s)")
    add("--measured", type=float, metavar="T", help="measured tokens per second and device in bf16, if known")
    texts = "".join(command.format_help() for command in (doctor, advisor, certifier, watcher))
    parser.options = re.findall(r"--[a-z-]+", texts)
    return parser


def _advise(options: argparse.Namespace) -> int:
    job = advise.Job(
        shape=advise.shape_of(options.model),
        ranks=options.ranks,
        tokens=options.tokens,
        sequence=min(options.tokens, advise.SEQUENCE) if options.sequence is None else options.sequence,
        micro_batches=options.micro_batches,
        accelerator=advise.ACCELERATORS[options.device],
        links=advise.LINKS[options.links],
        measured=options.measured,
    )
    _write(advise.facts(job) if options.json else advise.report(job))
    return 0


def _certify(options: argparse.Namespace) -> int:
    properties = options.properties or PROPERTIES
    check(properties)
    logging.disable(logging.WARNING)  # the models exist for this test only
    try:
        target = options.target
        certificates = {target: from_file(target, properties)} if target else _certificates(rows(properties))
    finally:
        logging.disable(logging.NOTSET)
    facts = {
        name: {each: dataclasses.asdict(answer) for each, answer in row.items()} for name, row in certificates.items()
    }
    lines = [table(certificates, properties), "", *engines(certificates), "", *explanations(certificates)]
    _write(facts if options.json else "\n".join(lines))
    return 0


def _certificates(subjects: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Run the functions and return their certificates by name.

    On a terminal, stderr shows the current name and the estimated time that is left.
    """
    named, certificates, began = list(subjects), {}, time.monotonic()
    for count, (name, certify) in enumerate(named):
        if sys.stderr.isatty():
            left = (time.monotonic() - began) * (len(named) - count) / count if count else 0.0
            remaining = f", about {left:.0f} s left" * bool(count)
            sys.stderr.write(f"\r\x1b[K{count + 1} of {len(named)}: {name}{remaining}")
            sys.stderr.flush()
        certificates[name] = certify()
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return certificates


def _doctor(options: argparse.Namespace) -> int:
    gpu = None if options.gpu is None else gpu_named(options.gpu)
    choice, machine = backend(), detect()
    if gpu is not None:
        notes = filter(None, [link_note(gpu), f"The GPU of this machine is not used: {gpu.name} was given."])
        machine = dataclasses.replace(machine, devices=(machine.devices[0], gpu), notes=tuple(notes))
    plugins = discover(machine)
    _write((doctor_facts if options.json else doctor_text)(machine, plugins, choice))
    return int(any(plugin.problem for plugin in plugins))


def paths(machine: Machine, device: Device, choice: Backend) -> tuple[PathStatus, ...]:
    """Return the status of all FP8 paths on a device."""
    cast = cast_path(device, backend=choice, triton=machine.versions.get("triton"))
    return (cast, *(matmul_path(device, granularity) for granularity in GRANULARITIES), GATHER)


def doctor_facts(machine: Machine, plugins: Sequence[PluginReport], choice: Backend) -> dict[str, Any]:
    """Return the report of `fp8 doctor` as JSON values."""
    return {
        "schema": 1,
        "fp8_common": __version__,
        "machine": {"system": machine.system, "python": machine.python, "cores": machine.cores},
        "backend": choice,
        "devices": [
            dataclasses.asdict(device)
            | {
                "label": device.label,
                "native_formats": list(native_formats(device)),
                "paths": [dataclasses.asdict(path) for path in paths(machine, device, choice)],
                "status": entry_of(device),
                "gpu": gpu_entry(device),
            }
            for device in machine.devices
        ],
        "versions": machine.versions,
        "plugins": [dataclasses.asdict(plugin) for plugin in plugins],
        "notes": list(machine.notes),
    }


def doctor_text(machine: Machine, plugins: Sequence[PluginReport], choice: Backend) -> str:
    """Return the report of `fp8 doctor` as text."""
    device = machine.accelerator
    shown = paths(machine, device, choice)
    lines = [f"fp8-common {__version__} on {machine.system}, Python {machine.python}, {machine.cores} cores"]
    lines += ["", "Devices", *aligned([_device_row(each) for each in machine.devices], "  ")]
    lines += ["", f"FP8 on {device.label} ({device.name})", *_path_lines(shown, "  ")]
    tried = status_rows(device)
    known = load_status()["words"].items()
    words = [(f"{word}:", text) for word, text in known if any(word in row for _, row in tried)]
    lines += ["", f"What this version was tested with: {entry_of(device)['title']}"]
    lines += [f"  {named['name']} itself: {named['ran']}"] if (named := gpu_entry(device)) else []
    lines += [*aligned(_folded((row, name) for name, row in tried), "  "), *aligned(words, "    ")]
    lines += ["", "Plugins", *_plugin_lines(plugins, shown)]
    lines += ["", "Versions", *aligned(list(machine.versions.items()), "  ")]
    lines += ["", "Notes", *(f"  {note}" for note in machine.notes)] if machine.notes else []
    return "\n".join(lines)


def _device_row(device: Device) -> tuple[str, str]:
    formats = native_formats(device)
    return device.label, f"{device.name}, {'multiplies ' + ' and '.join(formats) if formats else 'no FP8 units'}"


def _plugin_lines(plugins: Sequence[PluginReport], shown: Sequence[PathStatus]) -> list[str]:
    """Return each plugin's report, with only the names of paths in `shown`."""
    if not plugins:
        return ["  none installed; fp8-torch-fsdp is the one for PyTorch FSDP2"]
    lines = []
    for plugin in plugins:
        if plugin.info is not None:
            lines.append(f"  {plugin.info.name} {plugin.info.version}: {plugin.info.summary}")
            if above := ", ".join(path.name for path in plugin.info.paths if path in shown):
                lines.append(f"    as above: {above}")
            lines += _path_lines([path for path in plugin.info.paths if path not in shown], "    ")
        if plugin.problem is not None:
            lines.append(f"  PROBLEM {plugin.entry}: {plugin.problem}")
    return lines


def _path_lines(statuses: Sequence[PathStatus], indent: str) -> list[str]:
    """Return a line for each status and reason, with its paths' names."""
    folded = _folded(((path.status, path.why), path.name) for path in statuses)
    return aligned([(status, f"{names}: {why}") for (status, why), names in folded], indent)


def _folded(pairs: Iterable[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Return each key once, with all its names."""
    names_of: dict[Any, list[str]] = {}
    for key, name in pairs:
        names_of.setdefault(key, []).append(name)
    return [(key, ", ".join(names)) for key, names in names_of.items()]


def _write(report: Any) -> None:
    text = report if isinstance(report, str) else json.dumps(report, indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")


def _discard_output() -> None:
    """Redirect stdout to the null device.

    Otherwise the interpreter flushes the rest at its end, and fails again.
    """
    with contextlib.suppress(OSError, ValueError):  # streams in tests have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
