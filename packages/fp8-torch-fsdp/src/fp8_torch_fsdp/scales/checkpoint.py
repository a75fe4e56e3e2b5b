"""`DelayedState`: delayed-scaling state for checkpoints."""

import torch
from torch import nn

from fp8_torch_fsdp.scales.delayed import BUFFERS, DelayedScale
from fp8_torch_fsdp.scales.sync import synchronize_all


class DelayedState:
    """State of a model's delayed scaling; a `Stateful`, like an optimizer.

    Save and load it next to the model, whose state dict has the keys of the unconverted model:

        dcp.save({"model": ..., "optimizer": ..., "delayed": DelayedState(model)}, checkpoint_id=folder)

    A run that resumes without this state begins with dynamic scales, and does not compute the same bits as an
    uninterrupted run.

    Args:
        model: Converted model. Without delayed scaling its state is empty.

    Examples:
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), recipe="tensorwise_delayed")
        >>> model(torch.full((8, 64), 2.0)).sum().backward()
        >>> state = DelayedState(model).state_dict()
        >>> list(state)[:3]
        ['0.fp8_input.scale', '0.fp8_input.history', '0.fp8_input.ready']
        >>> DelayedState(model).load_state_dict(state)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return five tensors for each delayed scale, by module name.

        Collective: call it on all ranks, which first combine their observations. The state is therefore exact after a
        step, and also between a backward and its step.

        Returns:
            `<module>.scale` and `.history`, float32 [...] and [..., window]; `.ready` and `.late`, bool [...]; and
            `.observed`, int32 [...], the bits of an amax. [...] is [experts] for stacks of experts, else [].
        """
        synchronize_all(self._model, roll=False)
        return {
            f"{name}.{buffer}": getattr(scale, buffer).clone() for name, scale in self._scales() for buffer in BUFFERS
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load `state_dict` on any number of ranks.

        Delayed scales that are missing in it are re-initialized.

        Raises:
            RuntimeError: If a tensor has another shape, because the window or the number of experts differs.
        """
        for name, scale in self._scales():
            scale.reset_parameters()
            scale.lacks_state = False
            for buffer in BUFFERS:
                if (value := state_dict.get(f"{name}.{buffer}")) is not None:
                    getattr(scale, buffer).copy_(value)

    def _scales(self) -> list[tuple[str, DelayedScale]]:
        return [(name, scale) for name, scale in self._model.named_modules() if isinstance(scale, DelayedScale)]
