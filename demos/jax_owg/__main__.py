"""The demo's program: check everything that can be checked, train, compare, report."""

import sys
from argparse import Namespace
from pathlib import Path

import jax

from demos import jax_owg as demo
from demos.common import report
from demos.common.command import Parser, positive, refusing
from demos.common.corpus import load_corpus
from demos.common.machine import machine_facts, package_versions
from demos.common.plot import require_matplotlib
from demos.common.progress import Progress
from demos.jax_owg import results
from demos.jax_owg.model import HEAD_DIM
from demos.jax_owg.train import ROWS, RUNS, train
from fp8_common import Fp8Error


def parse(arguments: list[str] | None = None) -> Namespace:
    """Read the command line.

    Raises:
        Fp8Error: An option asks for what cannot be done.
        SystemExit: The command line cannot be read (exit code 2), or asks for help.
    """
    parser = Parser(prog="python -m demos.jax_owg", description=demo.__doc__)
    add = parser.add_argument
    add("--steps", type=positive, default=160, help="optimizer steps of each run (default %(default)s)")
    add("--stages", type=positive, default=2, help="stages of the pipeline (default %(default)s)")
    add("--microbatches", type=positive, default=4, help=f"microbatches of {ROWS} rows (default %(default)s)")
    add("--dim", type=positive, default=64, help="width of the model (default %(default)s)")
    add("--seed", type=int, default=0, help="of parameters and batches (default %(default)s)")
    add("--data", metavar="PATH", help="file or folder to train on (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo-report"), help="folder of the report (default %(default)s)")
    options = parser.parse_args(arguments)
    if ROWS % options.microbatches:
        raise Fp8Error(f"--microbatches must divide {ROWS}, the rows of a batch, not be {options.microbatches}.")
    if options.dim % HEAD_DIM:
        raise Fp8Error(f"--dim must be a multiple of {HEAD_DIM} (the width of a head), not {options.dim}.")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options = parse(arguments)
    require_matplotlib()
    earlier = report.open_folder(options.out)
    corpus = load_corpus(options.data)
    with Progress(total=len(RUNS) * options.steps) as progress:
        progress.say(
            f"Training {len(RUNS)} times on {corpus.label} ({corpus.size:,} bytes), {options.stages} stages, "
            f"{options.microbatches} microbatches: {', '.join(RUNS)}."
        )
        records = {run: train(run, corpus, options, progress) for run in RUNS}
    words = results.summarize(records, options)
    finished = report.merge(
        earlier,
        machine={**machine_facts(), "device": jax.devices()[0].platform},
        versions=package_versions(),
        data={"path": corpus.label, "bytes": corpus.size},
        name="jax_owg",
        section=results.section(records, options),
        summary=words,
    )
    report.write(options.out, finished)
    told = finished["jax_owg"]["summary"]
    print("", report.plain_table(told), "", *told["verdict"], sep="\n")
    print(f"\nPicture, table and all numbers: {options.out}/ ({report.PICTURE}, {report.README}, {report.REPORT})")
    return 0


if __name__ == "__main__":
    sys.exit(refusing(main))
