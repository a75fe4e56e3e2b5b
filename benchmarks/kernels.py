"""Times the kernels on a GPU, or counts what their machine code needs on any machine.

    python -m benchmarks.kernels [--static] [--arch 90] [--kernel amax] [--output FILE] ...

torchao and TransformerEngine are measured beside ours where they are installed (`benchmarks.kernel_peers`).
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import NONE, Peers
from fp8_common import Fp8Error
from tests.helpers import aot


def main(arguments: Sequence[str] | None = None, peers: Peers = NONE) -> int:
    """Run the command, with `peers` beside our kernels; return its exit status."""
    options = _parser().parse_args(arguments)
    dtypes = options.dtype or ["bfloat16"]
    if options.static:
        from benchmarks import kernel_report

        _write(kernel_report.report(options.arch or aot.ARCHITECTURES, dtypes[0], options.fmt, peers), options.output)
        return 0
    from benchmarks import kernel_times

    save = (lambda text: None) if options.output is None else (lambda text: _write(text, options.output))
    try:
        result = kernel_times.run(
            megabytes=options.megabytes,
            dtypes=dtypes,
            fmt=options.fmt,
            kernels=options.kernel or (),
            minutes=options.minutes,
            save=save,
            peers=peers,
        )
    except Fp8Error as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _write(result, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description="Speed of the FP8 kernels.")
    add = parser.add_argument
    add("--static", action="store_true", help="count machine code instead of timing; needs no GPU")
    add("--arch", type=int, action="append", choices=aot.ARCHITECTURES, help="compute capability for --static")
    add("--dtype", action="append", choices=tuple(aot.INPUT_BYTES), help="input dtype; bfloat16 unless given")
    add("--fmt", default="e4m3", choices=["e4m3", "e5m2"], help="FP8 format")
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


if __name__ == "__main__":
    sys.exit(main())
