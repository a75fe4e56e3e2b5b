"""`Float8Log`: logs statistics of FP8 layers over all ranks, every N steps."""

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
    """Logs amax, scale, and saturated and underflowed shares of FP8 layers.

    Call `step()` on all ranks after each optimizer step.

    The first step, and every step whose number is a multiple of `every`, is measured over all ranks and micro-batches;
    other steps cost nothing. The first rank then appends one JSON line to the file, which `fp8 watch` shows, and logs
    one line of text. A measured step runs without `torch.compile` and needs one or two more passes over each
    operand. For experts and `Conv1D`, only gathered weights are measured.

    Args:
        model: Converted model, sharded or not.
        path: File to append to, or a folder for `fp8.jsonl`.
        every: Number of steps between entries, at least 1.
        scalars: Function such as `wandb.log`, called on the first rank with all numbers by name and the step.
        step: Number of steps that a resumed run has made before.
        group: Ranks that are combined; all by default.

    Raises:
        Fp8Error: If the model has no FP8 layers, or `every` is less than 1.

    Examples:
        >>> import tempfile
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder, Float8Log(model, folder, every=100) as log:
        ...     for batch in torch.ones(3, 8, 64):
        ...         model(batch).sum().backward()
        ...         optimizer.step()
        ...         line = log.step()  # text if the step was measured
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
            raise Fp8Error("The model has no FP8 layers to log. Call convert_to_float8_training(model) first.")
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
        """Stop measuring, and drop statistics that were not logged."""
        self._measured.close()
        self._monitor = None

    def step(self, step: int | None = None) -> str | None:
        """Record the end of an optimizer step.

        Collective: call it on all ranks after each step.

        Args:
            step: Number of the step that ended; by default the previous number plus 1.

        Returns:
            The line of text if the step was measured, on the first rank; None otherwise.
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
        # Compiled code does not call the monitor. If nothing imported the compiler, there is no compiled code, and the
        # import would cost a second.
        if "torch._dynamo" in sys.modules:
            self._measured.enter_context(torch.compiler.set_stance("force_eager"))


def _gathered(counts: Counts, group: dist.ProcessGroup | None) -> list[Counts] | None:
    """Return the counts of all ranks on the first rank, else None.

    Counts are gathered as Python objects with names, because the stages of a pipeline have different layers.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [counts]
    first = dist.get_rank(group) == 0
    per_rank: list = [None] * dist.get_world_size(group)
    dist.gather_object(counts, per_rank if first else None, group=group, group_dst=0)
    return per_rank if first else None


def _merged(ranks: list[Counts] | None) -> Counts | None:
    """Return the combined numbers of all ranks, by `<layer>/<tensor>`; NaN remains NaN."""
    if ranks is None:
        return None
    merged: Counts = {}
    for counts in ranks:
        for name, tensor in counts.items():
            combined = merged.setdefault(_tensor_name(name), {})
            for key, number in tensor.items():
                combined[key] = number if key not in combined else _combine(key, combined[key], number)
    return dict(sorted(merged.items(), key=lambda entry: _numbered(entry[0])))


def _combine(key: str, first: float, second: float) -> float:
    if key in COUNTS or key == "elements":
        return first + second
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return min(first, second) if key == "scale" else max(first, second)


def _tensor_name(name: str) -> str:
    """Return `<layer>/<tensor>` for a name of `Float8Monitor`, without prefixes of wrappers.

    The name of a gathered weight, `<layer>.<weight>/wire`, becomes `<layer>/<weight>`.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix("module.")
    if name.endswith("/wire"):
        layer, _, weight = name.removesuffix("/wire").rpartition(".")
        name = f"{layer}/{weight}".lstrip("/")
    return name


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places layer 10 after layer 9."""
    layer, _, tensor = name.rpartition("/")
    return [*((int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")), (-2, tensor)]


def _statistics(counted: dict[str, float]) -> TensorStatistics:
    elements = max(counted["elements"], 1)
    shares: dict[str, Any] = {key: counted[key] / elements for key in COUNTS if key in counted}
    return TensorStatistics(amax=counted.get("amax"), scale=counted.get("scale"), **shares)
