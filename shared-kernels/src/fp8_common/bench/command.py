"""The command `fp8-bench`: measured figures on a GPU, figures of the machine code anywhere."""

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8_common._cli_frame import Parser, framed
from fp8_common._errors import Fp8UnsupportedError
from fp8_common.bench import static
from fp8_common.bench.peers import NONE, Peers
from fp8_common.testing import aot


def main(arguments: Sequence[str] | None = None, peers: Peers = NONE) -> int:
    """Run the command, with `peers` beside our kernels; return its exit status."""
    return framed("fp8-bench", lambda: _run(_parser().parse_args(arguments), peers))


def _run(options: argparse.Namespace, peers: Peers) -> int:
    dtypes = options.dtype or ["bfloat16"]
    if options.static:
        _check(("triton",), "--static compiles the kernels", "fp8-common[triton]")
        text = static.report(options.arch or list(aot.ARCHITECTURES), dtypes[0], options.fmt, peers)
        _write(text, options.output)
        return 0
    _check(("torch",), "timing runs the kernels on tensors", "fp8-common[torch,triton]")
    if options.rates:
        from fp8_common.torch import _rates

        _write(_rates.run(), options.output)
        return 0
    from fp8_common.torch._bench import run

    keep = (lambda text: None) if options.output is None else (lambda text: _write(text, options.output))
    chosen = {"megabytes": options.megabytes, "dtypes": dtypes, "fmt": options.fmt, "kernels": options.kernel or ()}
    _write(run(**chosen, minutes=options.minutes, save=keep, peers=peers), options.output)
    return 0


def _check(needed: tuple[str, ...], what: str, extra: str) -> None:
    """Refuse to start without the modules that the work needs.

    Raises:
        Fp8UnsupportedError: One is not installed.
    """
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise Fp8UnsupportedError(f"{what} and needs {' and '.join(missing)}. Run: pip install '{extra}'")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fp8-bench", description="Speed of the FP8 kernels.")
    add = parser.add_argument
    add("--static", action="store_true", help="count machine code instead of timing; needs no GPU")
    add("--rates", action="store_true", help="measure what `fp8 advise --rates` takes, and nothing else")
    add(
        "--arch",
        type=int,
        action="append",
        choices=aot.ARCHITECTURES,
        help="compute capability for --static; all unless given",
    )
    dtypes = tuple(aot.INPUT_BYTES)
    add("--dtype", type=str.lower, action="append", choices=dtypes, help="input dtype; bfloat16 unless given")
    add("--fmt", type=str.lower, default="e4m3", choices=["e4m3", "e5m2"], help="FP8 format")
    add("--megabytes", type=int, nargs="+", default=[64, 256], help="sizes of the timed inputs")
    add("--kernel", action="append", help="time only this task, e.g. amax; all unless given")
    add("--minutes", type=float, default=math.inf, help="begin nothing later than this")
    add("--output", type=Path, help="write to this file instead of standard output")
    return parser


def _write(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(text + "\n")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
