"""`OwgLog`: writes delayed-scaling reports every N steps for `fp8 watch`."""

import math
import os
from typing import Any

import jax

from fp8_common import Fp8Error
from fp8_common.monitoring.limits import TensorStatistics
from fp8_common.monitoring.log import RunLog, Scalars
from fp8_jax_owg.reports import TensorReport, report
from fp8_jax_owg.state.pairs import COLLECTION, find_pairs, take


class OwgLog:
    """Logs statistics of tensors with delayed scaling: call `step(variables)` each step.

    Logs amax, scale and range.

    The first step and every N-th are logged: the first process appends one JSON line to the file, which `fp8 watch`
    shows, and logs one line of text. Shares of saturated values are not known from the state; the level follows from
    amax / largest magnitude that the scale represents, and from `report`.

    Args:
        path: The file, or the folder of the run, where it is `fp8.jsonl`. Lines are appended.
        every: Number of steps between entries.
        scalars: Called on the first process with all numbers by name and the step, as `wandb.log` is.
        step: How many steps were made before, of a run that resumes.

    Raises:
        Fp8Error: `every` is less than 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 100, scalars: Scalars | None = None, step: int = 0
    ) -> None:
        if every < 1:
            raise Fp8Error(f"every must be 1 or more, got {every}.")
        self._log, self._every, self._steps, self._first = RunLog(path, scalars), every, step, step + 1

    def step(self, variables: Any, step: int | None = None) -> str | None:
        """End a step; all processes call it.

        Args:
            variables: Variables, a state of NNX, or any tree with the state, after the step.
            step: The number of the step that ended; one more than before by default.

        Returns:
            The line of text on the first process, if the step is logged; else None.

        Raises:
            Fp8Error: The tree has no state, or state that is sharded over processes.
        """
        self._steps = self._steps + 1 if step is None else step
        if self._steps % self._every and self._steps != self._first:
            return None
        places, leaves = find_pairs(variables), jax.tree.leaves(variables)
        if not places:
            raise Fp8Error("The tree has no state of delayed scaling to log. Pass everything that init returned.")
        for place in places:
            for leaf in take(leaves, place):
                if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                    raise Fp8Error(
                        "State that is sharded over processes cannot be read by one of them. Pass "
                        "jax.experimental.multihost_utils.process_allgather(state, tiled=True)."
                    )
        if jax.process_index() != 0:
            return None
        tensors = report(variables).tensors
        named = {tensor.name.removeprefix(f"{COLLECTION}/"): _statistics(tensor) for tensor in tensors}
        return self._log.write(self._steps, named)


def _statistics(tensor: TensorReport) -> TensorStatistics:
    return TensorStatistics(
        amax=tensor.amax,
        scale=1 / tensor.scale if tensor.scale else math.inf,
        over_range=2.0**-tensor.headroom,
        notice="" if tensor.observed else "never observed",
        fault=tensor.suspicion,
    )
