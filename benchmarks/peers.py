"""`Peers`: what a benchmark compares the kernels with; the command itself knows none."""

from collections.abc import Callable, Iterator
from typing import Any

Runs = dict[str, Callable[[], object]]


class Peers:
    """Implementations of other projects; a subclass offers some, this one has none."""

    def runs(self, x: Any, fmt: Any) -> dict[str, Runs]:
        """Return for each task the implementations that peers offer, by their names.

        Args:
            x: The input, [rows, columns], a tensor on the device that is timed.
            fmt: The FP8 format.
        """
        del x, fmt
        return {}

    def precompute(self, weights: int, device: Any) -> Runs:
        """Return what peers do to take the amax of as many `weights` on `device`, by their names."""
        del weights, device
        return {}

    def machine_code(self, capability: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and figures of kernels compiled for a compute capability, columns as in `static.report`."""
        del capability
        yield from ()


NONE = Peers()
