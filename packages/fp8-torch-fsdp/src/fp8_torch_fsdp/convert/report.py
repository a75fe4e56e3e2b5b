"""`float8_conversion_report`: how many bytes of each class compute in FP8, travel in FP8, or stay wide."""

import dataclasses
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.convert.adapters import adapters
from fp8_torch_fsdp.convert.expert_layouts import is_conv1d, layout_of
from fp8_torch_fsdp.convert.heads import HeadReport, output_heads
from fp8_torch_fsdp.convert.routers import routers, stacked_parameters
from fp8_torch_fsdp.layers.module import Float8Module, original_class

UNKNOWN_EXPERTS = "3-D, matmuls unknown: describe them with experts={class: ExpertLayout(...)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """The parameters of one class of modules that have the same fate.

    Attributes:
        class_name: Class of the modules that own them, as it was before the conversion.
        why: Why they do not compute in FP8; empty if they do.
        parameters: How many there are.
        bytes: What they hold in the reference dtype.
        converted: Whether products with them run in FP8.
        gathered: Bytes of those that FSDP2 gathers in FP8.
    """

    class_name: str
    why: str
    parameters: int
    bytes: int
    converted: bool
    gathered: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The parameters of a model, largest first, and its output heads; `str()` makes a table."""

    classes: tuple[ClassReport, ...]
    heads: tuple[HeadReport, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all parameters in the reference dtype."""
        return sum(one.bytes for one in self.classes)

    @property
    def converted(self) -> float:
        """Share of the bytes whose products run in FP8."""
        return sum(one.bytes for one in self.classes if one.converted) / max(1, self.bytes)

    @property
    def gathered(self) -> float:
        """Share of the bytes that FSDP2 gathers in FP8."""
        return sum(one.gathered for one in self.classes) / max(1, self.bytes)

    @property
    def unknown_experts(self) -> int:
        """How many parameters are stacks of experts that nothing was known about."""
        return sum(one.parameters for one in self.classes if one.why == UNKNOWN_EXPERTS)

    @property
    def headline(self) -> str:
        """The shares, what was left, and a sentence for each output head."""
        left = [
            f"{one.bytes / max(1, self.bytes):.1%} {one.class_name} ({one.parameters} parameters, {one.why})"
            for one in self.classes
            if not one.converted and one.bytes * 1000 >= self.bytes
        ]
        rest = f" Left: {'; '.join(left)}." if left else ""
        heads = "".join(f" {head}" for head in self.heads)
        return f"{self.converted:.1%} of the weights converted, {self.gathered:.1%} gathered in FP8.{rest}{heads}"

    def __str__(self) -> str:
        """Return the sentence and a table with one line for each class and fate."""
        width = max([len(one.class_name) for one in self.classes], default=5)
        lines = [self.headline, f"{'class':{width}}  {'params':>6}  {'bytes':>17}  {'FP8':>3}  {'gathered':>17}  why"]
        lines += [
            f"{one.class_name:{width}}  {one.parameters:>6}  {one.bytes:>17,}  {'yes' if one.converted else 'no':>3}  "
            f"{one.gathered:>17,}  {one.why}".rstrip()
            for one in self.classes
        ]
        return "\n".join(lines)


def float8_conversion_report(model: nn.Module, *, reference_dtype: torch.dtype = torch.bfloat16) -> ConversionReport:
    """Report which weights of `model` compute in FP8 and which FSDP2 gathers in FP8, by class of module.

    Args:
        model: Any model, converted or not, on any device, "meta" too; sharded ones while they are sharded.
        reference_dtype: The dtype that bytes are counted in.

    Returns:
        One entry for each class of modules and fate of its parameters. A parameter that several modules share is
        counted where it is found first, and computes in FP8 if one of them does; lazy ones without a shape are not
        counted. And one entry for each output head: a linear layer that shares an embedding's weight or gives as many
        values as the largest embedding has rows.
    """
    heads = output_heads(model)
    in_fp8 = {id(layer.weight) for head, layer in heads.items() if head.fp8 and head.shared_with}
    known = dict.fromkeys(adapters(model), "adapter") | dict.fromkeys(routers(model, {}), "router")
    seen = set[int]()
    count, size, gathered = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            why = "" if id(parameter) in in_fp8 else _why_wide(module, name, parameter, known.get(module, ""))
            key = _original_name(module), why
            own = parameter.numel() * reference_dtype.itemsize
            count[key] += 1
            size[key] += own
            local = getattr(parameter, "_local_tensor", parameter)
            gathered[key] += own if isinstance(local, ShardedFloat8Weight) else 0
    rows = [
        ClassReport(
            class_name=name,
            why=why,
            parameters=count[name, why],
            bytes=size[name, why],
            converted=not why,
            gathered=gathered[name, why],
        )
        for name, why in size
    ]
    rows.sort(key=lambda row: (-row.bytes, row.class_name, row.why))
    return ConversionReport(classes=tuple(rows), heads=tuple(heads))


def _original_name(module: nn.Module) -> str:
    kind = type(module)
    return (original_class(kind) if isinstance(module, Float8Module) else kind).__name__


def _why_wide(module: nn.Module, name: str, parameter: nn.Parameter, kind: str) -> str:
    """Return why products with a parameter run in high precision, a `kind` of layer that stays so; "" if in FP8."""
    if isinstance(module, Float8Module) and name in module.fp8:
        return ""
    if parameter.ndim < 2 or (isinstance(module, Float8Module) and parameter.ndim == 2):
        return "bias, norm, or other vector"
    if kind:
        return kind
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if any(parameter is one for one in stacked_parameters(module)):
        return "experts, not converted" if layout_of(module, {}) else UNKNOWN_EXPERTS
    return "linear, not converted" if isinstance(module, nn.Linear) or is_conv1d(module) else "no linear layer"
