"""The training processes: how they are started, watched and stopped, so that none outlives this one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any

from demos.common.machine import usable_cores
from demos.torch_fsdp.options import Options
from fp8_common import Fp8Error

LOG = "training.log"
STOPPED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SECONDS_TO_STOP = 20

Event = dict[str, Any]


class TrainingFailedError(RuntimeError):
    """The training processes ended before their time, or what they measured cannot be right."""


class Interrupted(BaseException):
    """The demo was told to stop.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` wherever the program is when Ctrl-C or a request to end arrives."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in STOPPED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_training(options: Options, digest: str, listen: Callable[[Event], None]) -> None:
    """Train with `options.ranks` processes under torchrun; `listen` gets rank 0's events as they come.

    Raises:
        Fp8Error: a training process refused its task.
        TrainingFailedError: one ended early; its last words are in the log beside the report.
        Interrupted: the demo was told to stop. Like the error before, it names --resume where that is possible.
    """
    path = options.out / LOG
    try:
        with path.open("w+") as log:
            _train(options, digest, listen, log)
    except (TrainingFailedError, Interrupted) as end:
        if options.checkpoint:
            end.add_note("Go on with the same options and --resume.")
        if isinstance(end, Interrupted):
            path.unlink()
        raise
    path.unlink()


def _train(options: Options, digest: str, listen: Callable[[Event], None], log: IO[str]) -> None:
    process = _start(options, digest, log)
    try:
        for event in _events(process):
            if event["event"] == "refused":
                raise Fp8Error(event["message"])
            listen(event)
        code = process.wait()
    finally:
        _stop(process)
    if code:
        raise TrainingFailedError(_what_happened(log))


def _start(options: Options, digest: str, log: IO[str]) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    worker = [f"--nproc-per-node={options.ranks}", "-m", "demos.torch_fsdp.train"]
    threads = max(1, usable_cores() // options.ranks)
    # CUBLAS_WORKSPACE_CONFIG: without it cuBLAS may add in another order in the next run.
    settings = {"OMP_NUM_THREADS": str(threads), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(
        [*torchrun, *worker, options.to_json(), digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **settings},
        start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in good order
    )


def _events(process: subprocess.Popen) -> Iterator[Event]:
    """Yield rank 0's events until no training process is left; what libraries print is passed over."""
    for line in process.stdout or ():
        if line.startswith('{"event"'):
            yield json.loads(line)


def _stop(process: subprocess.Popen) -> None:
    """Close the pipe that the training processes watch, and wait until the last of them is gone."""
    with contextlib.suppress(subprocess.TimeoutExpired), _deaf():
        process.communicate(timeout=SECONDS_TO_STOP)
    process.kill()
    process.wait()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let a second Ctrl-C not keep the first one from stopping everything."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _what_happened(log: IO[str]) -> str:
    log.seek(0)
    text = log.read()
    signals = {int(code) for code in re.findall(r"exitcode\s*:\s*-(\d+)", text)}
    if killed := signals - {signal.SIGTERM}:  # torchrun itself ends the others with SIGTERM
        return f"A training process was killed by signal {killed.pop()}, so the others were stopped."
    raised = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)", text, re.MULTILINE)
    reason = f" ({raised[0]})" if raised else ""
    return f"A training process ended early{reason}; its own words are in {log.name!r}."
