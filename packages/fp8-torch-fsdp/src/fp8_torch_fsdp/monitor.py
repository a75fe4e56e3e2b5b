"""`Float8Monitor`: statistics of FP8 training, kept on the device until collected.

Monitoring costs one or two passes over each operand, and nothing while no monitor is attached.
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
    """Collects amax, scale, saturation and underflow of every `Float8Linear`.

    Use it as a context manager, or call `close()`. `collect()` moves all numbers to the host at once and returns a flat
    dictionary, ready for `SummaryWriter.add_scalar`:

    * `<layer>/<operand>/amax`: largest absolute value; NaN if the operand had a NaN.
    * `<layer>/<operand>/scale`: the smallest scale in use.
    * `<layer>/<operand>/saturated`: share of values that were clamped to the largest FP8 value.
    * `<layer>/<operand>/underflowed`: share of non-zero values that became zero.
    * `<layer>/<operand>/nonfinite`: share of infinities and NaN.
    * `<weight>/wire/scale`, `<weight>/wire/amax`: smallest scale and largest amax (over all ranks) of the all-gather.
    * `<weight>/wire/saturated`, `<weight>/wire/underflowed`, `<weight>/wire/nonfinite`: shares of this rank's shard.

    Operands are "input", "grad_output" and, unless the weight is gathered or distributed, "weight". Statistics cover
    all matmuls since the last `collect()`. `Float8Log` writes them to a file.

    Args:
        model: Converted model, or a part of it.

    Examples:
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
        >>> with Float8Monitor(model) as monitor:
        ...     output = model(torch.ones(8, 64))
        >>> statistics = monitor.collect()
        >>> statistics["0/input/amax"], statistics["0/input/saturated"]
        (1.0, 0.0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._statistics: dict[str, Statistics] = {}  # by operand since the last collection, on its device
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
        for name, layer in self._layers.items():
            layer.fp8["weight"].watch(functools.partial(self._record, name))

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching; statistics that were not collected remain available."""
        for layer in self._layers.values():
            layer.fp8["weight"].watch(None)

    def collect(self) -> dict[str, float]:
        """Return the statistics since the last call.

        All numbers are moved from the device in one transfer.
        """
        numbers: dict[str, float] = {}
        for prefix, counted in self.collect_counts().items():
            elements = max(counted.pop("elements"), 1)
            numbers |= {f"{prefix}/{key}": n / elements if key in COUNTS else n for key, n in counted.items()}
        return numbers

    def collect_counts(self) -> dict[str, dict[str, float]]:
        """Return the statistics of `collect` by operand, with counts instead of shares.

        The counts "saturated", "underflowed", "nonfinite" and "elements" of several ranks can be added.
        """
        statistics, self._statistics = self._statistics, {}
        # No sync before the first gather: the ranks have not agreed on scales yet.
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
        """Record a cast of a layer, and with inputs its weight, too.

        Args:
            layer: Name of the layer.
            name: Name of the operand.
            x: Values before the cast.
            operand: Result of the cast.
        """
        self._add(layer, name, x, operand)
        matmul, weight = self._layers[layer].fp8["weight"], self._layers[layer].weight
        plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
        # only weights that are neither gathered nor distributed
        if (
            name == "input"
            and type(plain) in (torch.Tensor, nn.Parameter)
            and not (matmul.cast_options or matmul.spec.gather)
        ):
            self._add(layer, "weight", plain.detach(), matmul.weight_operand(plain.detach(), False, False))

    def _add(self, layer: str, name: str, x: torch.Tensor, operand: Quantized) -> None:
        counted, prefix = _measure(x, operand), f"{layer}/{name}".lstrip("/")
        if prefix in self._statistics:
            before = self._statistics[prefix]
            counted = {key: COMBINE.get(key, torch.add)(before[key], number) for key, number in counted.items()}
        self._statistics[prefix] = counted


Statistics = dict[str, torch.Tensor]
"""Scalar tensors: "amax" and "scale" (if known), and counts of elements."""

COUNTS = ("saturated", "underflowed", "nonfinite")
"""Counts that `collect` divides by "elements"."""

COMBINE = {"amax": torch.maximum, "scale": torch.minimum}
"""Functions that combine the numbers of several casts; counts are added."""


def _of_weight(weight: Fp8Weight) -> Statistics:
    """Return a gathered weight's scale and amax, and its local counts."""
    counted, part = {"scale": weight.scale.min()} if weight.scale.numel() else {}, weight.part
    # Bits of non-negative floats sort like the floats. For static and MX scales the ranks do not exchange amax.
    counted["amax"] = weight.bits.max().view(torch.float32) if weight.bits.numel() else casts.amax(part)
    counted["nonfinite"] = (~torch.isfinite(part)).sum()
    counted["elements"] = torch.full((), part.numel(), device=part.device)
    if weight.newest is None or not weight.newest.codes or weight.grid.is_mx:
        return counted
    # An optimizer may have written to the part since it was cast. The codes, and the amax from before the cast, are
    # still available; the values that were cast are not.
    grid, (codes,) = weight.grid, weight.newest.codes
    fmt = grid.cast.fp8_format
    values = decoding.values(codes.view(casts.torch_dtype(fmt)), fmt)
    cast_amax = weight.local_bits.to(codes.device).view(torch.float32)
    scale = weight.newest.scale.to(codes.device)
    amax = counted["amax"] if weight.is_static else cast_amax.view(scale.shape)
    over = grid.of_part((amax * scale > _above(fmt.max)).float(), codes.shape, weight.region)
    counted["saturated"] = ((values.abs() == fmt.max) & (over > 0)).sum()
    zeros = (values == 0).sum() - (codes.numel() - part.numel()) - (part == 0).sum()
    counted["underflowed"] = zeros.clamp(min=0) * (amax.max() > 0)
    return counted


def _on_host(numbers: list[torch.Tensor]) -> list[float]:
    """Return scalar tensors as numbers, with one wait for the device."""
    if not numbers:
        return []
    # Under CPU offload, statistics of weights are on the CPU and those of layers on the GPU.
    common = next((n.device for n in numbers if n.device.type != "cpu"), numbers[0].device)
    return torch.stack([n.float().to(common) for n in numbers]).tolist()


def _above(limit: float | torch.Tensor) -> float | torch.Tensor:
    """Return a limit raised by one part in 2^20.

    A value that exceeds the limit by less does so because the scale was rounded, and does not count as saturated.
    """
    return limit * (1 + 2.0**-20)


def _measure(x: torch.Tensor, operand: Quantized) -> Statistics:
    """Return amax, scale and counts of the cast of `x` to `operand`."""
    finite = torch.isfinite(x)
    # largest magnitude that the scale maps into the range of the format
    limit = operand.fmt.max * operand.expanded_scale_inv
    rounded = decoding.values(operand.codes, operand.fmt)
    scale_inv = operand.scale_inv.max() if operand.scale_inv.numel() else operand.scale_inv.new_ones(())
    return {
        "amax": casts.amax(x),
        "scale": 1 / scale_inv,
        "saturated": (finite & (x.abs() > _above(limit))).sum().double(),
        "underflowed": ((rounded == 0) & (x != 0)).sum().double(),
        "nonfinite": (~finite).sum().double(),
        "elements": torch.full((), x.numel(), device=x.device).double(),
    }
