"""`Float8Monitor`: statistics of FP8 training, which stay on the device until somebody asks for them.

Watching costs a pass or two over each operand, and nothing while no monitor is attached.
"""

import dataclasses
from types import TracebackType

import torch
from torch import nn

from fp8_common.torch.linear.operand import Operand
from fp8_common.torch.plugin import dispatch
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.slot import Slot
from fp8_torch_fsdp.scales.sync import syncs_of


@dataclasses.dataclass(slots=True)
class _Statistics:
    """Sums over what one operand held since the last collection; tensors on its device."""

    amax: torch.Tensor
    scale_inv: torch.Tensor
    saturated: torch.Tensor
    underflowed: torch.Tensor
    nonfinite: torch.Tensor
    elements: int


class Float8Monitor:
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
        self._statistics: dict[tuple[str, str], _Statistics] = {}
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
        for name, layer in self._layers.items():
            layer.fp8["weight"].watch(_Watcher(self, name))

    def __enter__(self) -> "Float8Monitor":
        """Return the monitor."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching; collected statistics stay."""
        for layer in self._layers.values():
            layer.fp8["weight"].watch(None)

    def collect(self) -> dict[str, float]:
        """Return everything since the last call as plain numbers; one transfer from the device."""
        numbers: dict[str, torch.Tensor] = {}
        for (layer, operand), s in self._statistics.items():
            entries = {
                "amax": s.amax,
                "scale": 1 / s.scale_inv,
                "saturated": s.saturated / s.elements,
                "underflowed": s.underflowed / s.elements,
                "nonfinite": s.nonfinite / s.elements,
            }
            prefix = f"{layer}/{operand}".lstrip("/")
            numbers |= {f"{prefix}/{key}": value for key, value in entries.items()}
        self._statistics.clear()
        # none before the first gather: there is no scale that the ranks agreed on
        for sync in syncs_of(self._model):
            for slot in sync.slots:
                numbers |= _of_weight(f"{slot.name}/wire", slot)
        return _as_floats(numbers)

    @torch.no_grad()
    def _record(self, layer: str, name: str, x: torch.Tensor, operand: Operand) -> None:
        new = _measure(x, operand)
        old = self._statistics.get((layer, name))
        self._statistics[layer, name] = new if old is None else _merged(old, new)


@dataclasses.dataclass(frozen=True, slots=True)
class _Watcher:
    """What a layer calls with each operand that it casts."""

    monitor: Float8Monitor
    layer: str

    def __call__(self, name: str, x: torch.Tensor, operand: Operand) -> None:
        self.monitor._record(self.layer, name, x, operand)


def _of_weight(prefix: str, slot: Slot) -> dict[str, torch.Tensor]:
    """Return what is known of a weight as it travels, scalar tensors."""
    collected = {f"{prefix}/scale": slot.scale.min()}
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


def _measure(x: torch.Tensor, operand: Operand) -> _Statistics:
    scale_inv = operand.wide_scale_inv
    finite = torch.isfinite(x)
    # the largest magnitude that this scale brings into the range of the format
    limit = operand.fmt.max * scale_inv
    became = dispatch.values(operand.codes, operand.fmt)
    return _Statistics(
        amax=dispatch.amax(x),
        scale_inv=operand.scale_inv.max() if operand.scale_inv.numel() else operand.scale_inv.new_ones(()),
        # one part in 2^20 above the limit is the rounding of scale and limit, not saturation
        saturated=(finite & (x.abs() > limit * (1 + 2.0**-20))).sum(),
        underflowed=((became == 0) & (x != 0)).sum(),
        nonfinite=(~finite).sum(),
        elements=max(x.numel(), 1),
    )


def _merged(a: _Statistics, b: _Statistics) -> _Statistics:
    return _Statistics(
        amax=torch.maximum(a.amax, b.amax),
        scale_inv=torch.maximum(a.scale_inv, b.scale_inv),
        saturated=a.saturated + b.saturated,
        underflowed=a.underflowed + b.underflowed,
        nonfinite=a.nonfinite + b.nonfinite,
        elements=a.elements + b.elements,
    )
