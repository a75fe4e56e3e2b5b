"""Measure and merge an adapter into published FP8 weights.

An adapter moves most weights by less than half a code, so that rounding to the nearest code keeps little of it.
Stochastic rounding keeps all of it on average, and adds an error that is larger than the adapter. The default is
therefore not to merge.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init.published.weight import CODES, E4M3, PublishedWeight, operand_of, reshard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerMerge:
    """Effect of a merge on one layer.

    Attributes:
        name: The layer that has the adapter.
        size: |delta| / |weight|, of Frobenius norms.
        share: Part of the delta that the codes represent, with the file's scales: its projection on the delta; 1 is
            all.
        error: |merged - delta| / |delta| in the codes. Above 1, no merge at all is closer.
        copy_error: The same of a bfloat16 copy of the layer.
    """

    name: str
    size: float
    share: float
    error: float
    copy_error: float

    @property
    def advice(self) -> Literal["apart", "bfloat16", "codes"]:
        """Recommended merge.

        A bfloat16 copy that represents half of the delta, codes that represent nine tenths, else a separate adapter.
        """
        if self.error < 0.1:
            return "codes"
        return "bfloat16" if self.copy_error < 0.5 else "apart"


class MergeReport(list[LayerMerge]):
    """The layers of a model with adapters; printed, it is a table."""

    def __str__(self) -> str:
        """Return a line for each layer."""
        lines = [f"{'layer':50} {'|d|/|w|':>9} {'share':>7} {'error':>7} {'bf16 error':>10}  advice"]
        lines += [
            f"{layer.name:50} {layer.size:9.1e} {layer.share:7.1%} {layer.error:7.3f} {layer.copy_error:10.3f}  "
            f"{layer.advice}"
            for layer in self
        ]
        return "\n".join(lines)


@torch.no_grad()
def merge_report(model: nn.Module, adapter: str = "default") -> MergeReport:
    """Measure the loss of merging an adapter into codes or bfloat16.

    Reports each layer; changes nothing.

    Args:
        model: A model under PEFT, not sharded, with LoRA on published weights.
        adapter: The name of the adapter.

    Returns:
        The report, to be printed.

    Raises:
        Fp8Error: The model is sharded, or has no such adapter on a published weight.
        Fp8UnsupportedError: The adapter is DoRA.
    """
    report = MergeReport()
    for name, layer in _adapted(model, adapter):
        weight, delta = layer.base_layer.weight, _delta(name, layer, adapter)
        old = operand_of(weight).dequantize()
        stored = old.bfloat16().float()
        codes = _merged_codes(weight, delta).float() * operand_of(weight).expanded_scale_inv
        norm = delta.double().norm().clamp(min=torch.finfo(torch.float32).tiny)
        arrived = (codes - old).double()
        share = float((arrived * delta).sum() / norm**2)
        copy = ((old + delta).bfloat16().float() - stored).double()
        report.append(
            LayerMerge(
                name=name,
                size=float(norm / old.double().norm()),
                share=share,
                error=float((arrived - delta).norm() / norm),
                copy_error=float((copy - delta).norm() / norm),
            )
        )
    return report


@torch.no_grad()
def merge_adapter(
    model: nn.Module, layers: Iterable[str], *, into: Literal["bfloat16", "codes"], adapter: str = "default"
) -> None:
    """Merge adapters of the named layers into codes or bfloat16 copies.

    Other layers are not changed.

    Look at `merge_report` first. The adapter's B becomes zero, so that it adds nothing any more. `save_published`
    writes merged codes in the published layout; bfloat16 copies are part of the state dict.

    Args:
        model: As of `merge_report`.
        layers: Names of the report.
        into: "bfloat16" takes two bytes for each weight; "codes" keeps scales and rounds to the nearest codes.
        adapter: The name of the adapter.

    Raises:
        Fp8Error: As of `merge_report`; or a name is not in the report, or the choice is unknown.
    """
    if into not in ("bfloat16", "codes"):
        raise Fp8Error(f'into must be "bfloat16" or "codes", got {into!r}.')
    adapted, names = dict(_adapted(model, adapter)), list(layers)
    if unknown := [name for name in names if name not in adapted]:
        raise Fp8Error(f"No adapter {adapter!r} on published weights at {', '.join(unknown)}.")
    for name in names:
        layer = adapted[name]
        weight, delta = layer.base_layer.weight, _delta(name, layer, adapter)
        if into == "codes":
            weight.codes.view(torch.uint8).copy_(_merged_codes(weight, delta).view(torch.uint8))
        else:
            values = (operand_of(weight).dequantize() + delta).bfloat16()
            layer.base_layer.weight = nn.Parameter(values, requires_grad=False)
            del layer.base_layer.weight_scale_inv
        layer.lora_B[adapter].weight.zero_()


def _adapted(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    adapted = False
    reshard(model)
    for name, layer in model.named_modules():
        base: Any = getattr(layer, "base_layer", None)
        weight = getattr(base, "weight", None)
        if isinstance(weight, DTensor):
            raise Fp8Error(f"{name} is sharded: load the model and the adapter whole to merge.")
        if isinstance(weight, PublishedWeight) and adapter in getattr(layer, "lora_A", ()):
            adapted = True
            yield name, layer
    if not adapted:
        raise Fp8Error(f"The model has no adapter {adapter!r} on a published weight.")


def _delta(name: str, layer: Any, adapter: str) -> torch.Tensor:
    """Return the float32 delta [out_features, in_features] that an adapter adds."""
    if adapter in getattr(layer, "lora_magnitude_vector", ()):
        raise Fp8UnsupportedError(f"{name} has DoRA, which scales the weight too: keep the adapter separate.")
    return layer.get_delta_weight(adapter).float()


def _merged_codes(weight: PublishedWeight, delta: torch.Tensor) -> torch.Tensor:
    """Return nearest codes of values plus delta at the current scales.

    Sums above the largest code saturate.
    """
    operand = operand_of(weight)
    ready = (operand.dequantize() + delta) / operand.expanded_scale_inv
    return ready.clamp(-E4M3.max, E4M3.max).to(CODES)
