"""`ScalesApart`: delayed scales that a framework keeps beside the weights in a checkpoint, not among them."""

from functools import partial
from typing import Any

import torch
from torch import nn

from fp8_torch_fsdp._delayed import DelayedScale


class ScalesApart:
    """The delayed scales of a model, which its state dict leaves out from now on.

    Args:
        model: A converted model; without delayed scaling there is nothing to do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._scales = {name: one for name, one in model.named_modules() if isinstance(one, DelayedScale)}
        model.register_state_dict_post_hook(partial(self._leave_out))  # torch marks what it is given

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of all scales, by the names that it would have among the weights."""
        scales = [scale.state_dict(prefix=f"{name}.") for name, scale in self._scales.items()]
        return {name: value for scale in scales for name, value in scale.items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take back what `state_dict` returned."""
        for name, scale in self._scales.items():
            length = len(name) + 1
            scale.load_state_dict({key[length:]: v for key, v in state_dict.items() if key.startswith(f"{name}.")})

    def _leave_out(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in self.state_dict():
            state_dict.pop(f"{prefix}{name}", None)
