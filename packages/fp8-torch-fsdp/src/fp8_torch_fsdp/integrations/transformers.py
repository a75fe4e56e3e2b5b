"""`Float8Callback`: `Float8Log` as a callback of Transformers' `Trainer`."""

import os
from typing import Any

from fp8_common import Fp8UnsupportedError
from fp8_common.monitoring.log import Scalars
from fp8_torch_fsdp.step_log import Float8Log

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.transformers needs Transformers ({error}). Install it, or call "
        "fp8_torch_fsdp.Float8Log in your loop."
    ) from error


class Float8Callback(TrainerCallback):
    """Logs statistics of FP8 layers: `Trainer(..., callbacks=[Float8Callback()])`. See `Float8Log`.

    Args:
        path: The file or the folder; `output_dir` of the `TrainingArguments` by default.
        every: How many steps apart.
        scalars: Called on the first rank with all numbers by name and the step, as `wandb.log` is.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, every: int = 100, scalars: Scalars | None = None
    ) -> None:
        self._path, self._every, self._scalars = path, every, scalars
        self._log: Float8Log | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **rest: Any) -> None:
        """Begin with the model as the Trainer has sharded it."""
        path = args.output_dir if self._path is None else self._path
        self._log = Float8Log(model, path, every=self._every, scalars=self._scalars, step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Log a measured step."""
        if self._log is not None:
            self._log.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop."""
        if self._log is not None:
            self._log.close()
