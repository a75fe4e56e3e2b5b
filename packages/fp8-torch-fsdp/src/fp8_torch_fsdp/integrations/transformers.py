"""A callback of Transformers' `Trainer` that keeps delayed scales in a file beside the weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_torch_fsdp.integrations._scales_apart import ScalesApart

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.transformers needs Transformers ({error}). Install the package transformers."
    ) from error

FILE = "fp8_delayed_scales.pt"
"""The file of a checkpoint that holds the state of delayed scaling."""


class Float8Checkpoints(TrainerCallback):
    """Keeps delayed scales in a file of their own in each checkpoint: `Trainer(callbacks=[Float8Checkpoints(model)])`.

    From now on the model's `state_dict` is that of the model before the conversion, and so is what `save_pretrained`
    writes. A resumed run takes the scales back before its first step.

    Args:
        model: The converted model.
        resume_from: The folder given to `train(resume_from_checkpoint=)`, where it is not one of the output folder.
    """

    def __init__(self, model: nn.Module, *, resume_from: str | Path | None = None) -> None:
        self._apart, self._resume_from = ScalesApart(model), resume_from

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the file, whole or not at all."""
        scales = self._apart.state_dict()
        if state.is_world_process_zero and scales:
            path = _checkpoint(args, state) / FILE
            partial = path.with_suffix(".partial")
            torch.save(scales, partial)
            partial.replace(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Take the scales of the checkpoint that a run is resumed from; Trainer has loaded the weights.

        Raises:
            Fp8Error: The checkpoint has no such file; on all ranks.
        """
        if not state.global_step or not self._apart.state_dict():
            return
        path = Path(self._resume_from or _checkpoint(args, state)) / FILE
        if not path.is_file():
            raise Fp8Error(
                f"There is no {path}: resume without Float8Checkpoints what was saved without it, and say resume_from "
                "if the checkpoint is in another folder."
            )
        self._apart.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
