"""`DelayedState`: delayed-scaling state for checkpoints."""

import torch
from torch import nn

from fp8_torch_fsdp.scales.delayed import BUFFERS, DelayedScale
from fp8_torch_fsdp.scales.sync import synchronize_all


class DelayedState:
    """State of a model's delayed scaling; a `Stateful`, like an optimizer.

        dcp.save({"model": ..., "optimizer": ..., "delayed": DelayedState(model)}, checkpoint_id=folder)

    The model's own state dict has the keys of the unconverted model. A run that resumes without this state begins with
    dynamic scales: healthy, but not equal in its bits.

    Args:
        model: A converted model; without delayed scaling there is nothing to save.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return five tensors for each delayed scale, by module name.

        `scale` and `history` are float32 [...] and [..., window], `ready` and `late` bool, `observed` int32 bits, where
        [...] is [experts] for stacks, else [].

        Every rank calls it: the ranks first combine their observations, so that the state is exact after a step
        and between a backward and its step.
        """
        synchronize_all(self._model, roll=False)
        return {
            f"{name}.{buffer}": getattr(scale, buffer).clone() for name, scale in self._scales() for buffer in BUFFERS
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load `state_dict` on any number of ranks.

        Scales that are not in it are re-initialized.

        Raises:
            RuntimeError: A tensor has another shape, from another window or number of experts.
        """
        for name, scale in self._scales():
            scale.reset_parameters()
            scale.lacks_state = False
            for buffer in BUFFERS:
                if (value := state_dict.get(f"{name}.{buffer}")) is not None:
                    getattr(scale, buffer).copy_(value)

    def _scales(self) -> list[tuple[str, DelayedScale]]:
        return [(name, scale) for name, scale in self._model.named_modules() if isinstance(scale, DelayedScale)]
