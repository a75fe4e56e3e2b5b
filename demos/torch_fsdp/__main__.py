"""The demo's program: check everything that can be checked, train, compare, report."""

import sys
from collections import defaultdict
from typing import Any

from demos.common import report
from demos.common.command import refusing
from demos.common.corpus import Corpus, load_corpus
from demos.common.machine import machine_facts, package_versions
from demos.common.plot import require_matplotlib
from demos.common.progress import Progress
from demos.torch_fsdp import launch, results
from demos.torch_fsdp.checkpointing import Record, claim
from demos.torch_fsdp.options import Options, parse

NAMES = {"bf16": "bf16", "fp8": "FP8"}


class Listener:
    """Shows the events of the training processes and keeps what they measured.

    Attributes:
        facts: what they said at the start: device, parameters, tokens per step.
        records: of each run, in the order of the seeds.
    """

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.facts: dict[str, Any] = {}
        self.records: dict[str, list[Record]] = defaultdict(list)

    def __call__(self, event: launch.Event) -> None:
        """Take one event."""
        kind = event.pop("event")
        if kind == "start":
            self.facts = event
        elif kind == "begin":
            self.progress.begin(self.name(event), self.options.steps, done=event["done"])
        elif kind == "step":
            self.progress.step(event.pop("done"), **event)
        elif kind == "end":
            record = Record(**event["record"])
            self.records[event["run"]].append(record)
            self.progress.say(f"{self.name(event)}: held-out loss {record.val_loss:.4f}")

    def name(self, event: launch.Event) -> str:
        """Return what a run is called on the screen."""
        seed = f" seed {event['seed']}" if self.options.seeds > 1 else ""
        return NAMES[event["run"]] + seed


def main() -> int:
    """Run the demo; returns the exit code."""
    options = parse()
    require_matplotlib()
    earlier = report.open_folder(options.out)
    corpus = load_corpus(options.data)
    if options.checkpoint:
        claim(options.checkpoint, options.identity(corpus.digest), resume=options.resume)
    with Progress(total=2 * options.steps * options.seeds) as progress:
        each = f" with each of {options.seeds} seeds" if options.seeds > 1 else ""
        progress.say(
            f"Training twice{each} on {corpus.label} ({corpus.size:,} bytes) with "
            f"{options.ranks} {options.device} process{'es' * (options.ranks > 1)}: "
            f"first with bf16 all-gather, then with FP8 ({options.recipe})."
        )
        listener = Listener(options, progress)
        launch.run_training(options, corpus.digest, listener)
    finished = make_report(options, corpus, listener, earlier)
    report.write(options.out, finished)
    words = finished["torch_fsdp"]["summary"]
    print("", report.plain_table(words), "", *words["verdict"], sep="\n")
    print(f"\nPicture, table and all numbers: {options.out}/ ({report.PICTURE}, {report.README}, {report.REPORT})")
    return 0


def make_report(options: Options, corpus: Corpus, listener: Listener, earlier: report.Report | None) -> report.Report:
    """Return the report with this demo's section in it."""
    facts = listener.facts
    runs = {
        run: results.run_figures(records, ranks=options.ranks, tokens_per_step=facts["tokens_per_step"])
        for run, records in listener.records.items()
    }
    settings = {name: getattr(options, name) for name in ("recipe", "gradients", "device", "dim", "layers", "seeds")}
    section = {
        "ranks": options.ranks,
        "steps": options.steps,
        "params": facts["params"],
        "runs": runs,
        "settings": {**settings, "tokens_per_step": facts["tokens_per_step"]},
        "bf16_val_loss_spread": results.spread(runs["bf16"]),
    }
    return report.merge(
        earlier,
        machine={**machine_facts(), "device": facts["device"]},
        versions=package_versions(),
        data={"path": corpus.label, "bytes": corpus.size},
        name="torch_fsdp",
        section=section,
        summary=results.summarize(runs, ranks=options.ranks, device=options.device, recipe=options.recipe),
    )


def run() -> int:
    """Run the demo and turn every end that can be expected into a sentence and an exit code."""
    try:
        with launch.interruptible():
            return refusing(main)
    except launch.Interrupted as stop:
        words, code = (
            "\nInterrupted: every training process is stopped, no report was written.",
            128 + stop.number,
        )
        notes = getattr(stop, "__notes__", [])
    except launch.TrainingFailedError as error:
        words, code = str(error), 1
        notes = getattr(error, "__notes__", [])
    print(" ".join([words, *notes]), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(run())
