"""`Float8Log`: writes statistics of FP8 layers every N steps, over ranks."""

import contextlib
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import Fp8Error
from fp8_common.monitoring.limits import TensorStatistics
from fp8_common.monitoring.log import RunLog, Scalars
from fp8_torch_fsdp.layers.module import Float8Module
from fp8_torch_fsdp.monitor import COUNTS, Float8Monitor

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that module wrappers add to layer names."""

Counts = dict[str, dict[str, float]]


class Float8Log(contextlib.AbstractContextManager):
    """Logs amax, scale, saturated and underflowed shares of FP8 layers.

    Call `step()` after each optimizer step.

    The first step and every N-th are measured, over all ranks and micro-batches, and the others cost nothing. The first
    rank appends one JSON line to the file, which `fp8 watch` shows, and logs one line of text. A measured step runs
    without `torch.compile`, a pass or two longer for each operand. Of experts, weights alone are measured.

    Args:
        model: The converted model, sharded or not.
        path: The file, or the folder of the run, where it is `fp8.jsonl`. Lines are appended.
        every: Number of steps between entries.
        scalars: Called on the first rank with all numbers by name and the step, as `wandb.log` is.
        step: How many steps were made before, of a run that resumes.
        group: The ranks; all by default.

    Raises:
        Fp8Error: The model has no FP8 layers, or `every` is less than 1.

    Example:
        >>> import torch, fp8_torch_fsdp
        >>> model = fp8_torch_fsdp.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> log = fp8_torch_fsdp.Float8Log(model, "run", every=100)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     train_step(batch)
        ...     log.step()
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        every: int = 100,
        scalars: Scalars | None = None,
        step: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not any(isinstance(module, Float8Module) for module in model.modules()):
            raise Fp8Error("The model has no FP8 layers to log. Call convert_to_float8_training(model) before.")
        if every < 1:
            raise Fp8Error(f"every must be 1 or more, got {every}.")
        self._model, self._every, self._steps, self._group = model, every, step, group
        self._log, self._measured = RunLog(path, scalars), contextlib.ExitStack()
        self._monitor: Float8Monitor | None = None
        self._measure()

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.close()

    def close(self) -> None:
        """Stop measuring; drop unlogged statistics."""
        self._measured.close()
        self._monitor = None

    def step(self, step: int | None = None) -> str | None:
        """End an optimizer step. Collective: all ranks call it after each.

        Args:
            step: The number of the step that ended; one more than before by default.

        Returns:
            The line of text on the first rank, if the step was measured; else None.
        """
        self._steps, line = self._steps + 1 if step is None else step, None
        if self._monitor is not None:
            counts = _merged(_gathered(self._monitor.collect_counts(), self._group))
            self.close()
            if counts is not None:
                line = self._log.write(self._steps, {name: _statistics(tensor) for name, tensor in counts.items()})
        if (self._steps + 1) % self._every == 0:
            self._measure()
        return line

    def _measure(self) -> None:
        self._monitor = self._measured.enter_context(Float8Monitor(self._model))
        # compiled code would have no place for the monitor; importing the compiler costs a second
        if "torch._dynamo" in sys.modules:
            self._measured.enter_context(torch.compiler.set_stance("force_eager"))


def _gathered(counts: Counts, group: dist.ProcessGroup | None) -> list[Counts] | None:
    """Return all ranks' counts on the first rank, None on others.

    As objects with names, because each stage of a pipeline has other layers.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [counts]
    first = dist.get_rank(group) == 0
    per_rank: list = [None] * dist.get_world_size(group)
    dist.gather_object(counts, per_rank if first else None, group=group, group_dst=0)
    return per_rank if first else None


def _merged(ranks: list[Counts] | None) -> Counts | None:
    """Return the numbers of all ranks together, by `<layer>/<tensor>`; NaN stays NaN."""
    if ranks is None:
        return None
    together: Counts = {}
    for counts in ranks:
        for name, tensor in counts.items():
            before = together.setdefault(_tensor_name(name), {})
            for key, number in tensor.items():
                before[key] = number if key not in before else _combine(key, before[key], number)
    return dict(sorted(together.items(), key=lambda entry: _numbered(entry[0])))


def _combine(key: str, one: float, other: float) -> float:
    if key in COUNTS or key == "elements":
        return one + other
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return min(one, other) if key == "scale" else max(one, other)


def _tensor_name(name: str) -> str:
    """Return an operand's `<layer>/<tensor>`, or a gathered weight's `<layer>.<weight>/wire`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix("module.")
    if name.endswith("/wire"):
        layer, _, weight = name.removesuffix("/wire").rpartition(".")
        name = f"{layer}/{weight}".lstrip("/")
    return name


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 10 behind layer 9."""
    layer, _, tensor = name.rpartition("/")
    return [*((int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")), (-2, tensor)]


def _statistics(counted: dict[str, float]) -> TensorStatistics:
    elements = max(counted["elements"], 1)
    shares: dict[str, Any] = {key: counted[key] / elements for key in COUNTS if key in counted}
    return TensorStatistics(amax=counted.get("amax"), scale=counted.get("scale"), **shares)
