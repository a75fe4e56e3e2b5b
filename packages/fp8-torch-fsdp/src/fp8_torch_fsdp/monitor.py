"""`Float8Monitor`: statistics of FP8 training, which stay on the device until somebody asks for them.

Watching costs a pass or two over each operand, and nothing while no monitor is attached.
"""

import contextlib
import functools

import torch
from torch import nn

from fp8_common.torch import casts, decoding
from fp8_common.torch.quantized import Quantized
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.slot import Slot
from fp8_torch_fsdp.scales.sync import syncs_of


class Float8Monitor(contextlib.AbstractContextManager):
    """Collects amax, scale, saturation and underflow of every FP8 layer.

    Use it as a context manager, or `close()` it. `collect()` moves all numbers to the host at once and returns a flat
    dictionary, ready for `SummaryWriter.add_scalar`:

    * `<layer>/<operand>/amax`: largest absolute value; NaN if there was one.
    * `<layer>/<operand>/scale`: the (smallest) scale in use.
    * `<layer>/<operand>/saturated`: share of values that were clamped to the largest FP8 value.
    * `<layer>/<operand>/underflowed`: share of non-zero values that became zero.
    * `<layer>/<operand>/nonfinite`: share of infinities and NaN.
    * `<weight>/wire/scale`, `<weight>/wire/amax`: what the all-gather uses (the largest amax over ranks).
    * `<weight>/wire/nonfinite`: share of infinities and NaN in this rank's shard.

    Operands are "input" and "grad_output". Statistics cover everything since the last `collect()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # of each operand since the last collection, on its device: largest of [amax, scale_inv], and sums
        self._statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
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
        """Return everything since the last call as plain numbers; one transfer from the device."""
        numbers: dict[str, torch.Tensor] = {}
        for prefix, ((amax, scale_inv), (saturated, underflowed, nonfinite, elements)) in self._statistics.items():
            numbers[f"{prefix}/amax"], numbers[f"{prefix}/scale"] = amax, 1 / scale_inv
            numbers[f"{prefix}/saturated"] = saturated / elements
            numbers[f"{prefix}/underflowed"] = underflowed / elements
            numbers[f"{prefix}/nonfinite"] = nonfinite / elements
        self._statistics.clear()
        # none before the first gather: there is no scale that the ranks agreed on
        for sync in syncs_of(self._model):
            for slot in sync.slots:
                numbers |= _of_weight(f"{slot.name}/wire", slot)
        return _as_floats(numbers)

    @torch.no_grad()
    def _record(self, layer: str, name: str, x: torch.Tensor, operand: Quantized) -> None:
        """Add what a layer has cast: `x` and what became of it."""
        largest, sums = _measure(x, operand)
        prefix = f"{layer}/{name}".lstrip("/")
        if prefix in self._statistics:
            before, sums_before = self._statistics[prefix]
            largest, sums = torch.maximum(before, largest), sums_before + sums
        self._statistics[prefix] = largest, sums


def _of_weight(prefix: str, slot: Slot) -> dict[str, torch.Tensor]:
    """Return what is known of a weight as it travels, scalar tensors."""
    collected = {f"{prefix}/scale": slot.scale.min()} if slot.scale.numel() else {}
    if slot.bits.numel():
        # The bits of floats that are not negative sort like the floats.
        collected[f"{prefix}/amax"] = slot.bits.max().view(torch.float32)
    collected[f"{prefix}/nonfinite"] = (~torch.isfinite(slot.part)).sum() / max(slot.part.numel(), 1)
    return collected


def _as_floats(numbers: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers: one wait for the device instead of one for each number."""
    if not numbers:
        return {}
    # Under CPU offload weights are on the CPU, and what layers saw is on the GPU.
    devices = [n.device for n in numbers.values()]
    common = next((device for device in devices if device.type != "cpu"), devices[0])
    together = torch.stack([n.float().to(common) for n in numbers.values()])
    return dict(zip(numbers, together.tolist(), strict=True))


def _measure(x: torch.Tensor, operand: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [amax, scale_inv] and float64 counts [saturated, underflowed, nonfinite, elements] of `x`."""
    finite = torch.isfinite(x)
    # the largest magnitude that this scale brings into the range of the format
    limit = operand.fmt.max * operand.wide_scale_inv
    became = decoding.values(operand.codes, operand.fmt)
    scale_inv = operand.scale_inv.max() if operand.scale_inv.numel() else operand.scale_inv.new_ones(())
    counts = (
        # one part in 2^20 above the limit is the rounding of scale and limit, not saturation
        (finite & (x.abs() > limit * (1 + 2.0**-20))).sum(),
        ((became == 0) & (x != 0)).sum(),
        (~finite).sum(),
        torch.full((), max(x.numel(), 1), device=x.device),
    )
    return torch.stack([casts.amax(x), scale_inv]), torch.stack(counts).double()
