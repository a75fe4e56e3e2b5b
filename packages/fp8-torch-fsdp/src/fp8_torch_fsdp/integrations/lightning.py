"""`Float8Callback`: `Float8Log` and `DelayedState` as a callback of Lightning's `Trainer`."""

import os
from typing import Any

from fp8_common import Fp8UnsupportedError
from fp8_common.monitoring.log import Scalars
from fp8_torch_fsdp.scales.checkpoint import DelayedState
from fp8_torch_fsdp.step_log import Float8Log

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.lightning needs Lightning ({error}). Install it, or call "
        "fp8_torch_fsdp.Float8Log in your loop."
    ) from error


STATE_KEY = "fp8_delayed_scales"
"""Key of a checkpoint for the state of delayed scaling."""


class Float8Callback(Callback):
    """Logs statistics with `Float8Log`, and checkpoints delayed-scaling state.

    Pass it to `Trainer(callbacks=[Float8Callback()])`. A run with delayed scaling that resumes from a checkpoint equals
    an uninterrupted run. Other recipes have no state to save.

    Args:
        path: File or folder of the log. Default: `default_root_dir` of the Trainer.
        every: Number of optimizer steps between entries.
        scalars: Function such as `wandb.log`, called on the first rank with all numbers by name and the step.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, every: int = 100, scalars: Scalars | None = None
    ) -> None:
        self._path, self._every, self._scalars = path, every, scalars
        self._log: Float8Log | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the log, after the strategy has sharded the model."""
        path = trainer.default_root_dir if self._path is None else self._path
        self._steps = trainer.global_step
        self._log = Float8Log(pl_module, path, every=self._every, scalars=self._scalars, step=self._steps)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """End a step of the log after each optimizer step."""
        if self._log is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._log.step(self._steps)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state of delayed scaling to a checkpoint."""
        if scales := DelayedState(pl_module).state_dict():
            checkpoint[STATE_KEY] = scales

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the state of delayed scaling if the checkpoint has it."""
        if STATE_KEY in checkpoint:
            DelayedState(pl_module).load_state_dict(checkpoint[STATE_KEY])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
