"""`Float8Monitor`: statistics of FP8 training, kept on the device until collected.

Watching costs a pass or two over each operand, and nothing while no monitor is attached.
"""

import contextlib
import functools

import torch
from torch import nn

from fp8_common.torch import casts, decoding
from fp8_common.torch.quantized import Quantized
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.sync import syncs_of
from fp8_torch_fsdp.scales.weight import Fp8Weight


class Float8Monitor(contextlib.AbstractContextManager):
    """Collects amax, scale, saturation and underflow of every FP8 layer.

    Use it as a context manager, or `close()` it. `collect()` moves all numbers to the host at once and returns a flat
    dictionary, ready for `SummaryWriter.add_scalar`:

    * `<layer>/<operand>/amax`: largest absolute value; NaN if there was one.
    * `<layer>/<operand>/scale`: the (smallest) scale in use.
    * `<layer>/<operand>/saturated`: share of values that were clamped to the largest FP8 value.
    * `<layer>/<operand>/underflowed`: share of non-zero values that became zero.
    * `<layer>/<operand>/nonfinite`: share of infinities and NaN.
    * `<weight>/wire/scale`, `<weight>/wire/amax`: values used by the all-gather (the largest amax over ranks).
    * `<weight>/wire/saturated`, `<weight>/wire/underflowed`, `<weight>/wire/nonfinite`: shares of this rank's shard.

    Operands are "input", "grad_output" and, where FSDP2 does not gather it, "weight". Statistics cover everything since
    the last `collect()`. `Float8Log` writes them to a file.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._statistics: dict[str, Statistics] = {}  # of each operand since the last collection, on its device
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
        for name, layer in self._layers.items():
            layer.fp8["weight"].watch(functools.partial(self._record, name))

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching; collected statistics stay."""
        for layer in self._layers.values():
            layer.fp8["weight"].watch(None)

    def collect(self) -> dict[str, float]:
        """Return statistics since the last call as numbers.

        One transfer from the device.
        """
        numbers: dict[str, float] = {}
        for prefix, counted in self.collect_counts().items():
            elements = max(counted.pop("elements"), 1)
            numbers |= {f"{prefix}/{key}": n / elements if key in COUNTS else n for key, n in counted.items()}
        return numbers

    def collect_counts(self) -> dict[str, dict[str, float]]:
        """Return `collect` by operand, with counts instead of shares.

        The counts of several ranks can be added: "saturated", "underflowed", "nonfinite" and "elements".
        """
        statistics, self._statistics = self._statistics, {}
        # none before the first gather: there is no scale that the ranks agreed on
        for sync in syncs_of(self._model):
            for weight in sync.weights:
                statistics[f"{weight.name}/wire"] = _of_weight(weight)
        keys = [(prefix, key) for prefix, entries in statistics.items() for key in entries]
        numbers = _on_host([statistics[prefix][key] for prefix, key in keys])
        collected: dict[str, dict[str, float]] = {prefix: {} for prefix in statistics}
        for (prefix, key), number in zip(keys, numbers, strict=True):
            collected[prefix][key] = number
        return collected

    @torch.no_grad()
    def _record(self, layer: str, name: str, x: torch.Tensor, operand: Quantized) -> None:
        """Add a layer's cast: `x` and its FP8 form."""
        self._add(layer, name, x, operand)
        matmul, weight = self._layers[layer].fp8["weight"], self._layers[layer].weight
        plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
        # neither gathered nor distributed
        if name == "input" and type(plain) in (torch.Tensor, nn.Parameter) and not (matmul.parts or matmul.spec.gather):
            self._add(layer, "weight", plain.detach(), matmul.weight_operand(plain.detach(), False, False))

    def _add(self, layer: str, name: str, x: torch.Tensor, operand: Quantized) -> None:
        counted, prefix = _measure(x, operand), f"{layer}/{name}".lstrip("/")
        if prefix in self._statistics:
            before = self._statistics[prefix]
            counted = {key: COMBINE.get(key, torch.add)(before[key], number) for key, number in counted.items()}
        self._statistics[prefix] = counted


Statistics = dict[str, torch.Tensor]
"""Scalar tensors "amax", "scale" (where they are known) and counts of elements."""

COUNTS = ("saturated", "underflowed", "nonfinite")
"""Counts that are reported as a share of "elements"."""

COMBINE = {"amax": torch.maximum, "scale": torch.minimum}
"""How numbers of several casts become one; counts are added."""


def _of_weight(weight: Fp8Weight) -> Statistics:
    """Return scale and amax of a gathered weight, and local counts."""
    counted, part = {"scale": weight.scale.min()} if weight.scale.numel() else {}, weight.part
    # The bits of floats that are not negative sort like the floats. Static and MX casts agree on none.
    counted["amax"] = weight.bits.max().view(torch.float32) if weight.bits.numel() else casts.amax(part)
    counted["nonfinite"] = (~torch.isfinite(part)).sum()
    counted["elements"] = torch.full((), part.numel(), device=part.device)
    if weight.newest is None or not weight.newest.codes or weight.grid.is_mx:
        return counted
    # An optimizer may have written to the part since it was cast: its codes and its amax then are left, not its values.
    grid, (codes,) = weight.grid, weight.newest.codes
    fmt = grid.cast.fp8_format
    values = decoding.values(codes.view(casts.torch_dtype(fmt)), fmt)
    seen = weight.own_bits.to(codes.device).view(torch.float32)
    scale = weight.newest.scale.to(codes.device)
    amax = counted["amax"] if weight.is_static else seen.view(scale.shape)
    over = grid.of_part((amax * scale > _above(fmt.max)).float(), codes.shape, weight.region)
    counted["saturated"] = ((values.abs() == fmt.max) & (over > 0)).sum()
    zeros = (values == 0).sum() - (codes.numel() - part.numel()) - (part == 0).sum()
    counted["underflowed"] = zeros.clamp(min=0) * (amax.max() > 0)
    return counted


def _on_host(numbers: list[torch.Tensor]) -> list[float]:
    """Return scalar tensors as numbers, with one wait for the device."""
    if not numbers:
        return []
    # Under CPU offload weights are on the CPU, and layers' statistics are on the GPU.
    common = next((n.device for n in numbers if n.device.type != "cpu"), numbers[0].device)
    return torch.stack([n.float().to(common) for n in numbers]).tolist()


def _above(limit: float | torch.Tensor) -> float | torch.Tensor:
    """Return the mask of values above a limit.

    One part in 2^20 is the rounding of scale and limit, not saturation.
    """
    return limit * (1 + 2.0**-20)


def _measure(x: torch.Tensor, operand: Quantized) -> Statistics:
    """Return amax, scale and counts of `x`, which was cast to `operand`."""
    finite = torch.isfinite(x)
    # the largest magnitude that this scale maps into the range of the format
    limit = operand.fmt.max * operand.expanded_scale_inv
    became = decoding.values(operand.codes, operand.fmt)
    scale_inv = operand.scale_inv.max() if operand.scale_inv.numel() else operand.scale_inv.new_ones(())
    return {
        "amax": casts.amax(x),
        "scale": 1 / scale_inv,
        "saturated": (finite & (x.abs() > _above(limit))).sum().double(),
        "underflowed": ((became == 0) & (x != 0)).sum().double(),
        "nonfinite": (~finite).sum().double(),
        "elements": torch.full((), x.numel(), device=x.device).double(),
    }
