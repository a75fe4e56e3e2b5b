"""`Float8Callback`: `Float8Log` and `DelayedState` as a callback of Transformers' `Trainer`."""

import os
from pathlib import Path
from typing import Any

import torch

from fp8_common import Fp8UnsupportedError
from fp8_common.monitoring.log import Scalars
from fp8_torch_fsdp.scales.checkpoint import DelayedState
from fp8_torch_fsdp.step_log import Float8Log

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.transformers needs Transformers ({error}). Install it, or call "
        "fp8_torch_fsdp.Float8Log in your loop."
    ) from error


STATE_FILE = "fp8_delayed_scales.pt"
"""File in a checkpoint's folder for the state of delayed scaling."""


class Float8Callback(TrainerCallback):
    """Logs statistics with `Float8Log`, and checkpoints delayed-scaling state.

    Pass it to `Trainer(..., callbacks=[Float8Callback()])`. A run with delayed scaling that resumes from
    `output_dir/checkpoint-N` equals an uninterrupted run. Other recipes have no state to save. The processes that write
    a checkpoint (`args.should_save`) write the state to its folder, as `fp8_delayed_scales.pt`.

    Args:
        path: File or folder of the log. Default: `output_dir` of the `TrainingArguments`.
        every: Number of steps between entries.
        scalars: Function such as `wandb.log`, called on the first rank with all numbers by name and the step.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, every: int = 100, scalars: Scalars | None = None
    ) -> None:
        self._path, self._every, self._scalars = path, every, scalars
        self._log: Float8Log | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **rest: Any) -> None:
        """Load the delayed-scaling state of a resumed run; open the log.

        The Trainer has sharded the model before this call.
        """
        if (file := _state_file(args, state)).is_file():
            scales = torch.load(file, weights_only=True)  # noqa: TID251 tensors only
            DelayedState(model).load_state_dict(scales)
        path = args.output_dir if self._path is None else self._path
        self._log = Float8Log(model, path, every=self._every, scalars=self._scalars, step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End a step of the log."""
        if self._log is not None:
            self._log.step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, **rest: Any) -> None:
        """Save the state of delayed scaling in the checkpoint's folder."""
        scales = DelayedState(model).state_dict()  # collective: all ranks call it
        if args.should_save and scales:
            torch.save(scales, _state_file(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _state_file(args: Any, state: Any) -> Path:
    """Return the path of the state in the checkpoint of this step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", STATE_FILE)
