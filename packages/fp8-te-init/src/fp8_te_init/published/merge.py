"""Merge adapters into published FP8 weights, and measure the loss.

An adapter changes most weights by less than half the distance of two codes, so that rounding to the nearest code
preserves little of it. Stochastic rounding preserves all of it on average, and adds an error larger than the adapter.
The default is therefore not to merge.
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

    `|x|` is the Frobenius norm, `delta` the change of the weight by the adapter, and `merged` the change of the decoded
    weight after a merge.

    Attributes:
        name: Name of the layer with the adapter.
        size: `|delta| / |weight|`.
        share: Projection of `merged` on `delta`, relative to `delta`, for codes at the file's scales; 1 is all of it.
        error: `|merged - delta| / |delta|` for codes. Above 1, the unmerged weight is closer.
        copy_error: The same error for a bfloat16 copy of the layer.
    """

    name: str
    size: float
    share: float
    error: float
    copy_error: float

    @property
    def advice(self) -> Literal["apart", "bfloat16", "codes"]:
        """Recommended merge.

        `"codes"` for an error below 0.1, else `"bfloat16"` for a `copy_error` below 0.5, else `"apart"`: keep the
        adapter separate.
        """
        if self.error < 0.1:
            return "codes"
        return "bfloat16" if self.copy_error < 0.5 else "apart"


class MergeReport(list[LayerMerge]):
    """List of the layers with adapters, which prints as a table."""

    def __str__(self) -> str:
        """Return a header and a line for each layer."""
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

    The report has an entry for each layer with the adapter. The model does not change.

    Args:
        model: Model under PEFT, not sharded, with LoRA on published weights.
        adapter: Name of the adapter.

    Returns:
        The report, which prints as a table.

    Raises:
        Fp8Error: If the model is sharded, or has no such adapter on a published weight.
        Fp8UnsupportedError: If the adapter is DoRA.
    """
    report = MergeReport()
    for name, layer in _adapted(model, adapter):
        weight, delta = layer.base_layer.weight, _delta(name, layer, adapter)
        old = operand_of(weight).dequantize()
        stored = old.bfloat16().float()
        codes = _merged_codes(weight, delta).float() * operand_of(weight).expanded_scale_inv
        norm = delta.double().norm().clamp(min=torch.finfo(torch.float32).tiny)
        merged = (codes - old).double()
        share = float((merged * delta).sum() / norm**2)
        copy = ((old + delta).bfloat16().float() - stored).double()
        report.append(
            LayerMerge(
                name=name,
                size=float(norm / old.double().norm()),
                share=share,
                error=float((merged - delta).norm() / norm),
                copy_error=float((copy - delta).norm() / norm),
            )
        )
    return report


@torch.no_grad()
def merge_adapter(
    model: nn.Module, layers: Iterable[str], *, into: Literal["bfloat16", "codes"], adapter: str = "default"
) -> None:
    """Merge adapters of the named layers into codes or bfloat16 copies.

    Read `merge_report` first. Other layers do not change. B of a merged adapter becomes zero, so that the adapter adds
    nothing. `save_published` writes merged codes in the published layout; bfloat16 copies are part of the state dict.

    Args:
        model: See `merge_report`.
        layers: Names of layers in the report.
        into: "codes" keeps the scales and rounds to the nearest codes. "bfloat16" replaces the weight with a copy of
            two bytes per element.
        adapter: Name of the adapter.

    Raises:
        Fp8Error: If `into` is unknown, a name is not in the report, the model is sharded, or it has no such adapter on
            a published weight.
        Fp8UnsupportedError: If the adapter is DoRA.
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
    """Yield names and layers with an adapter on a published weight."""
    has_adapter = False
    reshard(model)
    for name, layer in model.named_modules():
        base: Any = getattr(layer, "base_layer", None)
        weight = getattr(base, "weight", None)
        if isinstance(weight, DTensor):
            raise Fp8Error(f"{name} is sharded: load the model and the adapter whole to merge.")
        if isinstance(weight, PublishedWeight) and adapter in getattr(layer, "lora_A", ()):
            has_adapter = True
            yield name, layer
    if not has_adapter:
        raise Fp8Error(f"The model has no adapter {adapter!r} on a published weight.")


def _delta(name: str, layer: Any, adapter: str) -> torch.Tensor:
    """Return the float32 change [out_features, in_features] of a weight."""
    if adapter in getattr(layer, "lora_magnitude_vector", ()):
        raise Fp8UnsupportedError(f"{name} has DoRA, which scales the weight too: keep the adapter separate.")
    return layer.get_delta_weight(adapter).float()


def _merged_codes(weight: PublishedWeight, delta: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes of weight plus delta at its scales, saturated."""
    operand = operand_of(weight)
    scaled = (operand.dequantize() + delta) / operand.expanded_scale_inv
    return scaled.clamp(-E4M3.max, E4M3.max).to(CODES)
