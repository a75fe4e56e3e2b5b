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
    """Log of amax, scale and range of tensors with delayed scaling.

    Call `step(variables)` after each step. The first step and every N-th step are logged: the first process appends one
    JSON line to the file, which `fp8 watch` displays, and logs one line of text. The state does not hold the shares of
    saturated values, so a tensor is judged by its amax relative to the largest magnitude that its scale represents, and
    by the suspicions of `report`.

    Args:
        path: Log file, or folder of the run, in which the file is `fp8.jsonl`. Lines are appended.
        every: Number of steps between entries.
        scalars: Function (numbers by name, step) that the first process calls with each entry, such as `wandb.log`.
        step: Number of steps before this log, for a run that resumes.

    Raises:
        Fp8Error: If `every` is less than 1.

    Examples:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> state = {"dense": {"input_scale": jnp.full(1, 1 / 448), "input_amax_history": jnp.ones(4)}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = owg.OwgLog(folder, every=100)
        ...     log.step(state), log.step(state)  # the second entry will be step 100
        ('step 1: 1 layer, 1 ok', None)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 100, scalars: Scalars | None = None, step: int = 0
    ) -> None:
        if every < 1:
            raise Fp8Error(f"every must be 1 or more, got {every}.")
        self._log, self._every, self._steps, self._first = RunLog(path, scalars), every, step, step + 1

    def step(self, variables: Any, step: int | None = None) -> str | None:
        """Count a step, and log it if it is due.

        Call it on all processes.

        Args:
            variables: Variables, a state of NNX, or any other tree with the state, after the step.
            step: Number of the step that ended; by default one more than in the last call.

        Returns:
            The line of text on the first process if the step is logged, else None.

        Raises:
            Fp8Error: If the step is logged and the tree has no state, or has state that is sharded over processes.
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
