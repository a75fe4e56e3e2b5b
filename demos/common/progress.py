"""The progress of a running demo: a bar on a terminal, a line for every tenth of a run elsewhere."""

import importlib.util
import sys
import time
from types import TracebackType
from typing import Self, TextIO

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Progress:
    """Shows how far a demo is; a context manager, so that the terminal is put back in order after an error.

    The bar is drawn by rich where that is installed. Without it, or where the output is no terminal, plain lines
    say the same.

    Args:
        stream: where to show it; None is standard output.
        total: steps of all runs together, from which the time that is left is told; 0 tells none.
    """

    def __init__(self, stream: TextIO | None = None, *, total: int = 0) -> None:
        self._stream = stream or sys.stdout
        self._bar = _rich_bar(self._stream) if self._stream.isatty() else None
        self._task = None
        self._label, self._steps, self._told, self._at = "", 0, 0, 0
        self._total, self._done, self._started = total, 0, 0.0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, label: str, steps: int, *, done: int = 0) -> None:
        """Start a run of `steps` steps, of which `done` were done before."""
        self._label, self._steps, self._told, self._at = label, steps, done * 10 // max(steps, 1), done
        self._total -= min(done, self._total)
        self._started = self._started or time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(label, total=steps, completed=done, figures="")

    def step(self, done: int, *, loss: float, tokens_per_s: float, bytes_per_step: float | None = None) -> None:
        """Show the figures after `done` steps of the run; `bytes_per_step` where something travels."""
        self._done, self._at = self._done + done - self._at, done
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        if bytes_per_step is not None:
            figures += f"  {byte_count(bytes_per_step)}/step"
        if self._total > self._done:
            figures += f"  {self._time_left()}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, figures=figures)
        elif done * 10 // self._steps > self._told:
            self._told = done * 10 // self._steps
            self.say(f"{self._label:>11}  {done:>5}/{self._steps}  {figures}")

    def _time_left(self) -> str:
        """Return how long the steps that are left will take if they take as long as those so far."""
        seconds = (time.monotonic() - self._started) / max(self._done, 1) * (self._total - self._done)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


def byte_count(count: float) -> str:
    """Return a number of bytes in kB, MB or GB (powers of 1000) with two decimals."""
    unit, name = next(((unit, name) for unit, name in UNITS if count >= unit), UNITS[-1])
    return f"{count / unit:.2f} {name}"


def _rich_bar(stream: TextIO):  # noqa: ANN202  (rich is an extra: its types may be absent)
    if not importlib.util.find_spec("rich"):
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = [TextColumn("{task.description:>11}"), BarColumn(bar_width=9), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[figures]}")]
    return Bar(*columns, console=Console(file=stream))
