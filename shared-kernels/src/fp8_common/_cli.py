"""The `fp8` command: its arguments, its output and its exit codes.

0: done. 1: `fp8 doctor` found a broken plugin, `fp8 compare` a difference. 2: bad input, or an output that
cannot be written, explained in one sentence.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fp8_common import __version__
from fp8_common import _cli_advise as cli_advise
from fp8_common import _cli_compare as cli_compare
from fp8_common import _cli_doctor as cli_doctor
from fp8_common import _cli_explain as cli_explain
from fp8_common import _cli_formats as cli_formats
from fp8_common import _env as env
from fp8_common._cli_frame import Parser, framed
from fp8_common._cli_text import json_ready
from fp8_common._errors import Fp8Error
from fp8_common._formats import DATA_FORMATS
from fp8_common._machine import detect
from fp8_common._plugins import discover
from fp8_common.advise import plot

COMMANDS = ("doctor", "formats", "explain", "advise", "compare")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fp8` command and return its exit code.

    Args:
        argv: The arguments without the program's name; None takes the process's own.
    """
    arguments = sys.argv[1:] if argv is None else argv
    command = " ".join(["fp8", *(argument for argument in arguments[:1] if argument in COMMANDS)])
    return framed(command, lambda: _run([_escape_negative_number(argument) for argument in arguments]))


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fp8", description="FP8 formats, what this machine does with them, and single numbers.")
    parser.add_argument("--version", action="version", version=f"fp8-common {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add(
        commands,
        "doctor",
        _doctor,
        "what this machine, its frameworks and every plugin will do with FP8, and why",
    )
    _add(commands, "formats", _formats, "a table of every format")
    explain = _add(commands, "explain", _explain, "what becomes of one number: bits, neighbours, rounding error")
    explain.add_argument("value", metavar="VALUE", help="the number: 0.3, 1e-4, 0x1.8p-3, -inf, nan")
    names = ", ".join(fmt.name for fmt in DATA_FORMATS)
    explain.add_argument(
        "--format", default="e4m3", type=str.lower, metavar="F", help=f"one of {names}; e4m3 if left out"
    )
    explain.add_argument("--scale", default="1", metavar="S", help="multiplies into FP8; 1 if left out")
    summary = "what FP8 would be worth for a model on a machine, by a model of its step"
    advise = _add(commands, "advise", _advise, summary)
    cli_advise.add_arguments(advise)
    summary = "where two FP8 checkpoints for serving engines decode differently; exit code 1 if they do"
    compare = _add(commands, "compare", _compare, summary)
    compare.add_argument("first", metavar="A", help="a folder, or a file in the safetensors format")
    compare.add_argument("second", metavar="B", help="another one")
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.add_argument("--json", action="store_true", help="write JSON")
    command.set_defaults(run=run)
    return command


def _escape_negative_number(argument: str) -> str:
    """Put a blank before negative numbers, which argparse would take for options (-inf, -0x1p-3)."""
    # argparse recognizes plain negative decimals only. The blank hides the sign from it, and float() ignores blanks.
    if not argument.startswith("-"):
        return argument
    try:
        cli_explain.parse_number(argument)
    except Fp8Error:
        return argument
    return f" {argument}"


def _doctor(options: argparse.Namespace) -> int:
    backend = env.backend()
    machine = detect()
    plugins = discover(machine)
    if options.json:
        _print_json(cli_doctor.facts(machine, plugins, backend))
    else:
        print(cli_doctor.text(machine, plugins, backend))
    return int(any(plugin.problem for plugin in plugins))


def _formats(options: argparse.Namespace) -> int:
    if options.json:
        _print_json(cli_formats.facts())
    else:
        print(cli_formats.text())
    return 0


def _explain(options: argparse.Namespace) -> int:
    value, scale = cli_explain.parse_number(options.value), cli_explain.parse_number(options.scale)
    facts = cli_explain.facts(value, options.format, scale)
    if options.json:
        _print_json(facts)
    else:
        print(cli_explain.text(facts))
    return 0


def _advise(options: argparse.Namespace) -> int:
    found = cli_advise.jobs(options)
    if options.plot:
        plot(found[0], options.plot)
    if options.json:
        _print_json([cli_advise.facts(job) for job in found])
    else:
        print("\n\n".join(cli_advise.text(job, show_all=options.all) for job in found))
    return 0


def _compare(options: argparse.Namespace) -> int:
    found = cli_compare.facts(options.first, options.second)
    if options.json:
        _print_json(found)
    else:
        print(cli_compare.text(found))
    return int(bool(found["different"]))


def _print_json(facts: Any) -> None:
    print(json.dumps(json_ready(facts), indent=2, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
