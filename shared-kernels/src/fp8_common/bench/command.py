"""Decides the command `fp8-bench`: measured figures on a GPU, figures of the machine code anywhere."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8_common._errors import Fp8UnsupportedError
from fp8_common.bench import static
from fp8_common.bench.peers import NONE, Peers

ARCHITECTURES = (89, 90, 100)


def main(arguments: Sequence[str] | None = None, peers: Peers = NONE) -> int:
    """Run the command, with `peers` beside our kernels; return its exit status."""
    options = _parser().parse_args(arguments)
    dtypes = options.dtype or ["bfloat16"]
    try:
        if options.static:
            text = static.report(options.arch or list(ARCHITECTURES), dtypes[0], options.fmt, peers)
            _write(text, options.output)
            return 0
        from fp8_common.torch._bench import run

        keep = (lambda text: None) if options.output is None else (lambda text: _write(text, options.output))
        chosen = {"megabytes": options.megabytes, "dtypes": dtypes, "fmt": options.fmt, "kernels": options.kernel or ()}
        _write(run(**chosen, minutes=options.minutes, save=keep, peers=peers), options.output)
    except Fp8UnsupportedError as error:
        sys.stderr.write(f"fp8-bench: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8-bench", description="Speed of the FP8 kernels.")
    parser.add_argument("--static", action="store_true", help="count machine code instead of timing; needs no GPU")
    parser.add_argument("--arch", type=int, action="append", help="compute capability for --static, e.g. 90")
    parser.add_argument("--dtype", action="append", help="input dtype; bfloat16 unless given")
    parser.add_argument("--fmt", default="e4m3", choices=["e4m3", "e5m2"], help="FP8 format")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256], help="sizes of the timed inputs")
    parser.add_argument("--kernel", action="append", help="time only this task, e.g. amax; all unless given")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later than this")
    parser.add_argument("--output", type=Path, help="write to this file instead of standard output")
    return parser


def _write(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(text + "\n")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
