"""A benchmark result: a JSON document with its machine, its versions and ratios of one run."""

import dataclasses
import json
import logging
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

logger = logging.getLogger(__name__)
SCHEMA = 2
COPY = "copy"
"""The implementation that only copies as many bytes as its task moves."""
PACKAGES = ("fp8-common", "torch", "triton", "torchao", "transformer-engine", "jax", "flax", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One implementation of one kernel on one input.

    Attributes:
        kernel: What was computed.
        implementation: "ours" or the peer.
        dtype: Input dtype.
        shape: Input shape.
        bytes: Bytes that must be moved at least.
        seconds: Median time.
        runs: How many runs the median is of.
        equal: Whether the result equals the NumPy definition bit for bit; None if that is not what it computes.
    """

    kernel: str
    implementation: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    seconds: float
    runs: int
    equal: bool | None

    @property
    def gigabytes_per_second(self) -> float:
        """Bandwidth that the time amounts to."""
        return self.bytes / self.seconds / 1e9


def document(measurements: Iterable[Measurement], *, device: str, ceiling: float | None) -> dict[str, Any]:
    """Return the result as JSON can carry it.

    Args:
        measurements: What was measured, in one run.
        device: Name of the GPU or CPU.
        ceiling: Bandwidth of a large plain copy in the same run, GB/s; None if it was not measured. A task with a
            copy of its own is compared with that.
    """
    items = list(measurements)
    ours = {(m.kernel, m.dtype, m.shape): m.seconds for m in items if m.implementation == "ours"}
    copies = {(m.kernel, m.dtype, m.shape): m.gigabytes_per_second for m in items if m.implementation == COPY}
    rows = []
    for item in items:
        task = (item.kernel, item.dtype, item.shape)
        own, copied = ours.get(task), copies.get(task, ceiling)
        rows.append(
            dataclasses.asdict(item)
            | {
                "gigabytes_per_second": item.gigabytes_per_second,
                "of_ceiling": item.gigabytes_per_second / copied if copied else None,
                "ours_is_faster_by": item.seconds / own if own else None,
            }
        )
    return {
        "schema": SCHEMA,
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "copy_gigabytes_per_second": ceiling,
        "rows": rows,
    }


def render(result: dict[str, Any]) -> str:
    """Return a result document as JSON text."""
    return json.dumps(result, indent=1, allow_nan=False)


@dataclasses.dataclass(kw_only=True)
class Log:
    """A benchmark while it runs: what is known so far.

    Attributes:
        device: Name of the GPU.
        ceiling: Bandwidth of a large copy, GB/s.
        save: Takes the text after every task.
        measurements: What was measured.
        failures: What went wrong, by task.
        left_out: Tasks that were not tried.
    """

    device: str
    ceiling: float
    save: Callable[[str], None]
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def attempt(self, label: str, measure: Callable[[], list[Measurement]]) -> None:
        """Add what `measure` returns, or that it failed."""
        self.left_out.remove(label)
        logger.info("%s; %d more to come", label, len(self.left_out))
        try:
            self.measurements += measure()
        except Exception as error:  # one wrong kernel must not cost the figures of the others
            self.failures.append(f"{label}: {type(error).__name__}: {error}")
            logger.exception("%s", label)
        self.save(self.text())

    def text(self) -> str:
        """Return the result as JSON."""
        result = document(self.measurements, device=self.device, ceiling=self.ceiling)
        return render(result | {"failures": self.failures, "left_out": self.left_out})


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
