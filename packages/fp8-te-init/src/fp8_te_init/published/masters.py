"""`PublishedOptimizer`: trains published weights through float32 masters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.compat import distributed_like, local_of
from fp8_common.torch_layers.sharding.agreement import group_of_parts, max_by_group
from fp8_common.torch_layers.sharding.fsdp import region_of
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from fp8_te_init.published.weight import CODES, E4M3, Stored, published_of, reshard, scales_in_float32

GRANULARITIES = {None: "tensorwise", (1, 0): "rowwise", (128, 128): "blockwise_128x128"}


class PublishedOptimizer:
    """Optimizer of published weights with float32 masters.

    Masters start from the decoded values, exactly. After each step, scales are computed from the amax of the masters by
    the rule of published files: amax / 448 in the dtype of the file, or the next power of two for E8M0. Codes are
    rounded to nearest, so that `save_published` writes the published layout again. Under FSDP2 call `step` on all
    ranks: they agree on all scales in one MAX all-reduce for each process group.

    Args:
        optimizer: Class of an optimizer, or a function from parameters to an optimizer.
        model: Model that `load_published` has filled. Its published weights become trainable; other trainable
            parameters are optimized directly.
        **options: Options of the optimizer.

    Attributes:
        inner: The optimizer of the masters and of the other parameters.

    Examples:
        optimizer = PublishedOptimizer(torch.optim.AdamW, model, lr=1e-5)

    Raises:
        Fp8Error: If the model has no published weights.
    """

    def __init__(self, optimizer: Callable[..., Optimizer], model: nn.Module, **options: Any) -> None:
        self._masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        trained = []
        reshard(model)
        for parameter in model.parameters():
            weight = published_of(parameter)
            if weight is None:
                if parameter.requires_grad:
                    trained.append(parameter)
                continue
            parameter.requires_grad_(True)
            stored = weight.stored
            values = stored.values(0, stored.length, torch.float32)
            master = nn.Parameter(distributed_like(parameter, values))
            self._masters.append((parameter, master))
        if not self._masters:
            raise Fp8Error("The model has no published weights: call load_published first.")
        self.inner = optimizer([*trained, *(master for _, master in self._masters)], **options)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with float32 gradients, and write codes and scales.

        Collective: call it on all ranks.

        Raises:
            Fp8Error: If no published weight has a gradient.
        """
        if all(parameter.grad is None for parameter, _ in self._masters):
            raise Fp8Error(
                "No published weight has a gradient. Under FSDP2, make the PublishedOptimizer before the first "
                "forward, which selects the parameters with gradients."
            )
        for parameter, master in self._masters:
            grad = parameter.grad
            master.grad = None if grad is None else distributed_like(master, local_of(grad).float())
        self.inner.step()
        self.write_back()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self.inner.zero_grad()
        for parameter, _ in self._masters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the masters and the state of the inner optimizer.

        Training cannot resume exactly from codes alone, because masters have more bits.
        """
        return {"masters": [master.detach() for _, master in self._masters], "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load masters and state of equally many ranks; write codes and scales.

        Collective: call it on all ranks.
        """
        for (_, master), saved in zip(self._masters, state["masters"], strict=True):
            local_of(master).copy_(local_of(saved))
        self.inner.load_state_dict(state["inner"])
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Quantize the masters into codes and scales of the weights.

        Collective: call it on all ranks, for example after masters were changed.
        """
        parts = []
        for parameter, master in self._masters:
            weight: Any = published_of(parameter)
            granularity: Any = GRANULARITIES[weight.stored.block]
            grid = ScaleGrid(CastRecipe(granularity=granularity), stacked=weight.ndim == 3)
            values, region = local_of(master).detach(), region_of(parameter)
            parts.append((weight.stored, grid, values, region, group_of_parts(parameter)))
        bits, _ = max_by_group([(grid.amax_bits(values, region), group) for _, grid, values, region, group in parts])
        for (stored, grid, values, region, _), weight_bits in zip(parts, bits, strict=True):
            _write(stored, grid, values, region, grid.amax(weight_bits, stored.shape))


def _write(stored: Stored, grid: ScaleGrid, values: torch.Tensor, region: Region, amax: torch.Tensor) -> None:
    """Write the scales of the whole weight, and the local codes."""
    if stored.rows_of_one_scale > 1:
        matrices = amax.unflatten(1, (-1, stored.rows_of_one_scale))
        amax = matrices.amax(2, keepdim=True).expand_as(matrices)
    wanted = amax.reshape(stored.scale_inv.shape) / E4M3.max
    if stored.scale_inv.dtype == torch.uint8:
        # exponent bits of the next power of two; a block of zeros gets the smallest scale
        bits = wanted.contiguous().view(torch.int32)
        codes = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)
        scale = stored.scale_inv.copy_(codes)
    else:
        scale = stored.scale_inv.copy_(torch.where(wanted > 0, wanted, torch.ones_like(wanted)))
    scale_inv = grid.of_part(scales_in_float32(scale), values.shape, region)
    stored.codes[: len(values)].copy_((values / scale_inv).clamp(-E4M3.max, E4M3.max).to(CODES).view(torch.uint8))
