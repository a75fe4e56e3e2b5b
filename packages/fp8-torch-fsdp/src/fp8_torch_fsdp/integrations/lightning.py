"""A precision plugin for Lightning that converts the module before the optimizer is made."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8UnsupportedError
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.convert.model import convert_to_float8_training
from fp8_torch_fsdp.convert.select import ModuleFilter
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.state import DelayedState
from fp8_torch_fsdp.scales.sync import synchronize_scales

try:
    from lightning.pytorch.plugins.precision import Precision
except ImportError as error:
    raise Fp8UnsupportedError(
        f"fp8_torch_fsdp.integrations.lightning needs Lightning ({error}). Install the package named lightning, or "
        "call convert_to_float8_training in configure_model."
    ) from error


class Float8Precision(Precision):
    """FP8 linear layers in a Lightning `Trainer(plugins=[Float8Precision(...)])`.

    The module is converted before the optimizer is made. With `ModelParallelStrategy` call `convert_to_float8_training`
    yourself, in `configure_model` before `fully_shard`; the plugin then finds the layers and leaves the module alone.
    Models that are not sharded (one process, DDP) synchronize delayed scales after every optimizer step, and keep them
    in the plugin's part of a checkpoint.

    Args:
        recipe: Name of a recipe.
        config: A configuration instead.
        module_filter_fn: See `convert_to_float8_training`.
        autocast_dtype: Run forwards under autocast with this dtype, bfloat16 for example.
    """

    precision = "32-true"

    def __init__(
        self,
        recipe: str = "tensorwise",
        *,
        config: Float8LinearConfig | None = None,
        module_filter_fn: ModuleFilter | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self._config = config or Float8LinearConfig.from_recipe_name(recipe)
        self._filter, self._autocast_dtype = module_filter_fn, autocast_dtype
        self._scales: DelayedState | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place, unless it has FP8 layers already."""
        if any(isinstance(child, Float8Linear) for child in module.modules()):
            return module
        module = convert_to_float8_training(module, config=self._config, module_filter_fn=self._filter)
        self._scales = DelayedState(module)
        return module

    def state_dict(self) -> dict[str, Any]:
        """Return the delayed scales, which a checkpoint holds here and not among the weights."""
        return {} if self._scales is None else dict(self._scales.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the delayed scales; Lightning calls this after `convert_module`."""
        if self._scales is not None:
            self._scales.load_state_dict(state_dict)

    def forward_context(self) -> AbstractContextManager:
        """Return autocast if it was asked for."""
        if self._autocast_dtype is None:
            return nullcontext()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.autocast(device, dtype=self._autocast_dtype)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step, then synchronize delayed scales: `training_step` calls layers, not the module that was converted."""
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        # Sharded models synchronize in the forward of their root.
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            synchronize_scales(model, group=dist.group.WORLD if dist.is_initialized() else None)
        return result
