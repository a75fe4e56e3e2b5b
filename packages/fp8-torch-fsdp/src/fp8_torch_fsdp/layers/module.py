"""`Float8Module`: a module with FP8 matmuls, made by changing its class.

The communication of a module is its `ParallelStrategy`, the only extension point: FSDP2 needs none, tensor
parallelism and `fully_shard_traceable` define their own.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.compat import version_of
from fp8_common.torch.planned_casts import KeptCast, kept_cast
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import Gather, LinearSpec, fp8_linear
from fp8_common.torch_layers.linear.plan import Decided
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_torch_fsdp.all_gather.fsdp1 import raise_if_fsdp1
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.all_gather.state_dict import forget_state_dict_hooks, keep_state_dicts_plain
from fp8_torch_fsdp.config import Float8LinearConfig
from fp8_torch_fsdp.layers.rebind_forward import rebind
from fp8_torch_fsdp.scales.delayed import DelayedScale
from fp8_torch_fsdp.scales.weight import Fp8Weight

OPERANDS = ("input", "weight", "grad_output")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """Weights of a module, and its forward.

    Attributes:
        forward: Called with the converted module and the inputs of its forward; returns the forward's outputs.
        weights: The names of the parameters, [..., out_features, in_features].
        transposed: They are [..., in_features, out_features] instead.
        stacked: They are stacks, [experts, ...].
        projections: Each expert has several matrices, [experts, projections, out_features, in_features], which the
            forward multiplies as one. FSDP2 gathers them in high precision.
    """

    forward: Callable[..., Any]
    weights: tuple[str, ...] = ("weight",)
    transposed: bool = False
    stacked: bool = False
    projections: bool = False


class ParallelStrategy:
    """Parameter handling of a module: by default, whole parameters during compute.

    Under FSDP2 too, which gathers before the forward and before the backward.
    """

    gather: Gather | None = None
    """Gathers whole weights for each matmul; None if they are available."""

    # read-only, because all modules share it
    parts: Mapping[str, Any] = MappingProxyType({})
    """Remote parts of a weight, for `Fp8Weight.whole`."""

    def forward(self, layer: Any, input: torch.Tensor) -> torch.Tensor:
        """Return the output of a linear layer for `input`; see `Float8Linear.forward`."""
        output, bias = layer.fp8_matmul("weight", input, layer.weight), layer.bias
        return output if bias is None else with_bias(output, bias)

    def __deepcopy__(self, memo: dict) -> "ParallelStrategy":
        """A copied layer works with the same ranks."""
        return self


DEFAULT_STRATEGY = ParallelStrategy()
"""The distribution of modules that have their whole parameters when they compute; it has no state."""


class WeightMatmul:
    """The three matmuls of one weight, or of one stack of weights.

    Args:
        config: How to cast and multiply.
        layout: How the weight lies.
        scales: The state of delayed scaling of the operands that have it, for each expert of a stack.
        owner: The name of the class that multiplies, for errors.

    Attributes:
        config: As given.
        layout: As given.
        scales: As given.
        weight: How the weight is scaled; layers that share one share this.
        parts: Remote parts, for `Fp8Weight.whole`.
        kept: The launches of casts of the weight, decided once.
        casts_alone: Whether it may be cast both ways by launches that are decided once.
        spec: Static settings of `fp8_linear`.
        rows_per_expert: Of the last eager forward of a stack of weights, on average; None before.
    """

    def __init__(self, config: LinearConfig, layout: WeightLayout, scales: dict[str, DelayedScale], owner: str) -> None:
        self.config, self.layout, self.scales = config, layout, scales
        self.rows_per_expert: float | None = None
        self.parts: Mapping[str, Any] = {}
        self.kept: Decided[KeptCast | None] = Decided()
        # rows of a weight that lies transposed are columns
        self.casts_alone = not (layout.transposed and config.weight.granularity == "rowwise")
        # a constant is the scale of all experts
        stacked = layout.stacked and config.weight.scaling != "static"
        grid = ScaleGrid(config.weight, stacked=stacked, transposed=layout.transposed)
        self.weight = Fp8Weight(grid, scales.get("weight"))
        self.spec = LinearSpec(
            config,
            self.weight_operand,
            name=owner,
            transposed=layout.transposed,
            input_scale=scales.get("input"),
            grad_scale=scales.get("grad_output"),
        )
        self._unwatched = self.spec

    def __deepcopy__(self, memo: dict) -> "WeightMatmul":
        """Copy with the copied module's scales; a monitor is not copied."""
        scales = {name: copy.deepcopy(scale, memo) for name, scale in self.scales.items()}
        twin = WeightMatmul(self.config, self.layout, scales, self.spec.name)
        twin.weight = copy.deepcopy(self.weight, memo)
        twin.parts, twin._unwatched = self.parts, dataclasses.replace(twin.spec, gather=self.spec.gather)
        twin.watch(None)
        return twin

    def watch(self, watcher: Callable[[str, torch.Tensor, Quantized], None] | None) -> None:
        """Call `watcher` with each operand's name, matrix and FP8 form.

        `Float8Monitor` uses it; None ends it.
        """
        # Without a watcher return the previous object, which compiled code uses.
        self.spec = self._unwatched if watcher is None else dataclasses.replace(self._unwatched, watch=watcher)

    def distribute(self, distribution: "ParallelStrategy") -> None:
        """Gather whole weights as `distribution` does."""
        self.parts = distribution.parts
        self._unwatched = dataclasses.replace(self._unwatched, gather=distribution.gather)
        self.watch(self.spec.watch)

    def weight_operand(self, weight: torch.Tensor, record: bool, both: bool) -> Quantized:
        """Return the weight as an operand [..., out_features, in_features].

        Gathered codes are used directly; other weights are cast now.

        Args:
            weight: In any state.
            record: Whether delayed scaling observes it.
            both: Whether its codes are wanted transposed, too, if one launch makes both.
        """
        if isinstance(weight, GatheredWeight):
            operand = quantized(weight)
        else:
            plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
            if self.weight.declared_unchanged and not torch.compiler.is_compiling():
                operand = self._held(weight, plain, record)
            else:
                operand = self._quantized(plain, record, both)
        if self.layout.stacked and self.config.weight.granularity == "tensorwise":
            # one scale for each expert, or the constant of all
            scale_inv = operand.scale_inv.reshape(-1).expand(weight.shape[0])
            operand = Quantized(operand.codes, scale_inv, operand.fmt, operand.block)
        return operand.t() if self.layout.transposed else operand

    def _quantized(self, plain: torch.Tensor, record: bool, both: bool) -> Quantized:
        kept = self._cast_of(plain) if both and self.casts_alone and not self.parts else None
        if kept is not None and plain.is_contiguous():
            return kept(plain, self.scales.get("weight"), record)
        return self.weight.whole(plain, record=record, both=both, **self.parts)

    def _held(self, weight: torch.Tensor, plain: torch.Tensor, record: bool) -> Quantized:
        """Return kept codes of an unchanged weight, in both layouts.

        Another or a changed weight is cast now.
        """
        # operators on a wrapper do not change the version of the wrapped tensor
        writes = weight.fp8_weight.writes if isinstance(weight, ShardedFloat8Weight) else 0
        key = plain.data_ptr(), plain.shape, version_of(plain), writes
        held = self.weight.held
        if held is None or held[0] != key:
            # the weight too: its address goes to no other tensor meanwhile
            held = self.weight.held = key, self._quantized(plain, record, True), plain
        return held[1]

    def _cast_of(self, plain: torch.Tensor) -> KeptCast | None:
        """Return the planned cast in both layouts, for shape, dtype and device."""
        key = plain.shape, plain.dtype, plain.device, type(plain)
        if key not in self.kept:
            self.kept.keep(key, kept_cast(plain, plain.shape, self.config.weight, same_codes=True))
        return self.kept[key]


class Float8Module(nn.Module):
    """A module whose matmuls with some of its parameters run in FP8.

    It is a subclass of the module's class. Under FSDP2 the weights are gathered as FP8 codes, which the matmuls use
    directly. The module keeps its parameters, gradients, hooks and state dicts.

    Attributes:
        fp8: The matmuls of each weight, by its name.
        fp8_config: How to cast and gather.
        fp8_layout: Where the weights are, and the forward.
        distribution: Communication of the module with other ranks.
    """

    fp8: dict[str, WeightMatmul]
    fp8_config: Float8LinearConfig
    fp8_layout: WeightLayout
    distribution: ParallelStrategy

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the original class's forward with FP8 matmuls."""
        return self.fp8_layout.forward(self, *inputs, **options)

    @property
    def records(self) -> bool:
        """True if delayed scaling observes a forward that runs now."""
        # An evaluation must not move the scales of training.
        return self.training and torch.is_grad_enabled()

    def fp8_matmul(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T in FP8.

        Rows in groups, given by offsets, use the weight of their group.

        Args:
            name: The weight's name.
            x: [..., in_features].
            weight: The weight in any state, or this rank's part of it.
            offsets: Where the rows of each group end.

        Raises:
            Fp8Error: Shapes or offsets do not fit, the layout has no such weight, or it is distributed and not
                gathered.
        """
        keep_codes = self.keeps_codes(name, weight)
        y = fp8_linear(x, weight, self.fp8[name].spec, offsets, record=self.records, keep_codes=keep_codes)
        if offsets is not None and not torch.compiler.is_compiling():
            self.fp8[name].rows_per_expert = x.shape[0] / offsets.shape[0]  # for `float8_report`
        return y

    def keeps_codes(self, name: str, weight: torch.Tensor) -> bool:
        """Return whether a backward reuses the forward's codes of a weight.

        Raises:
            Fp8Error: The layout has no such weight, or it is distributed and not gathered.
        """
        if name not in self.fp8:
            raise Fp8Error(f"{name!r} is no weight of this module: its layout names {list(self.fp8)}.")
        if isinstance(weight, DTensor):
            raise Fp8Error(
                f"The weight {name} of {type(self).__name__} is distributed and not gathered. Call the model through "
                "the module that fully_shard was applied to; make linear layers tensor-parallel with "
                "Float8ColwiseParallel and Float8RowwiseParallel."
            )
        if torch.compiler.is_compiling():
            # Compilers keep casts that they generate if that pays. They would repeat launches in the backward.
            cast = self.fp8_config.weight
            launched = cast.scaling != "static"
            return launched and not isinstance(weight, GatheredWeight) and self.fp8_strategy.gather is None
        if self.fp8_config.all_gather or self.fp8[name].scales:
            raise_if_fsdp1(weight)
        # Such a weight is available without a gather, so its codes are never freed.
        return isinstance(weight, ShardedFloat8Weight)

    def distribute(self, distribution: ParallelStrategy) -> None:
        """Set the communication strategy of the module."""
        self.fp8_strategy = distribution
        for matmul in self.fp8.values():
            matmul.set_strategy(distribution)

    def extra_repr(self) -> str:
        """Show how the weights are cast."""
        cast = self.fp8_config.weight
        each = " for each expert" * self.fp8_layout.stacked
        return f"{', '.join(self.fp8)}, fp8={cast.scaling} {cast.granularity} {cast.format}{each}"


_ADDED = ("fp8", "fp8_config", "fp8_layout", "fp8_strategy")
"""Attributes that a converted module adds, besides delayed scales."""


def to_fp8(module: Any, cls: type[Float8Module], layout: WeightLayout, config: Float8LinearConfig) -> None:
    """Turn a module into an instance of `cls`, in place.

    Args:
        module: It has the parameters that the layout names.
        cls: Additional base class of the converted module.
        layout: How the weights lie, and the forward.
        config: How to cast and gather.

    Raises:
        Fp8Error: A weight is missing or has another number of dimensions or experts, or the class cannot be changed.
    """
    _check(module, layout, config)
    before = type(module)
    try:
        module.__class__ = _fp8_class(cls, before)
    except TypeError as error:
        raise Fp8Error(
            f"{before.__name__} does not allow another class ({error}). Leave it out with module_filter_fn."
        ) from error
    rebind(module, before)
    module.fp8_config, module.fp8_layout = config, layout
    module.fp8 = {}
    for name in layout.weights:
        weight = module._parameters[name]
        scales = {}
        for operand in OPERANDS:
            state = _delayed(getattr(config, operand), config, operand, weight, stacked=layout.stacked)
            # of linear layers without the weight's name, and None where nothing is delayed
            setattr(module, scale_name(module, operand, name), state)
            if state is not None:
                scales[operand] = state
        module.fp8[name] = WeightMatmul(config, layout, scales, type(module).__name__)
    module.set_strategy(DEFAULT_STRATEGY)
    keep_state_dicts_plain(module)


def to_original(module: Any) -> None:
    """Undo `to_fp8` without changing the weights."""
    after = type(module)
    for name in module.fp8:
        for operand in OPERANDS:
            delattr(module, scale_name(module, operand, name))
    for name in _ADDED:
        delattr(module, name)
    module.__class__ = original_class(after)
    rebind(module, after)
    forget_state_dict_hooks(module)


def scale_name(module: nn.Module, operand: str, weight: str) -> str:
    """Return the attribute name of an operand's delayed scale."""
    return f"fp8_{operand}" if isinstance(module, nn.Linear) else f"fp8_{operand}_{weight}"


def original_class(cls: type) -> Any:
    """Return the class that a module had before it was converted."""
    # (made class, Float8Linear, Float8Module, original, ...): the first that is not FP8
    return next(base for base in cls.__mro__ if not issubclass(base, Float8Module))


def with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `output` [..., features] plus the bias in its dtype."""
    return output if bias is None else output + bias.to(output.dtype)


@cache
def _fp8_class(cls: type[Float8Module], original: type[nn.Module]) -> type[Float8Module]:
    """Return `cls`, or a subclass of `cls` and a user's class."""
    # The same class for all modules of a kind (cached): type checks and compiled code then see one.
    if issubclass(cls, original):
        return cls
    return type(f"Float8{original.__name__}", (cls, original), {"__module__": original.__module__})


def _delayed(
    cast: CastRecipe, config: Float8LinearConfig, operand: str, weight: torch.Tensor, *, stacked: bool
) -> DelayedScale | None:
    """Return an operand's delayed-scaling state, None for other scaling.

    A stack has one scale per expert.
    """
    if cast.scaling != "delayed":
        return None
    return DelayedScale(
        cast,
        initial=config.delayed.initial if config.delayed else "dynamic",
        device=weight.device,
        count=weight.shape[0] if stacked else None,
        weight=operand == "weight",
    )


def _check(module: nn.Module, layout: WeightLayout, config: LinearConfig) -> None:
    name = type(module).__name__
    if config.weight.granularity == "mx" and (layout.stacked or layout.transposed):
        raise Fp8Error(
            f"{name} cannot compute in MX: its weights are no [out_features, in_features]. Give it another recipe, or "
            "leave it out with module_filter_fn."
        )
    if isinstance(module, nn.Linear):
        return
    shapes = {name: getattr(module._parameters.get(name), "shape", None) for name in layout.weights}
    dimensions = 2 + layout.stacked + layout.projections
    fit = all(shape is not None and len(shape) == dimensions and 0 not in shape for shape in shapes.values())
    experts = {shape[0] for shape in shapes.values() if shape}
    if not fit or (layout.stacked and len(experts) != 1):
        shapes_given = ", ".join(
            f"{name} {'missing' if shape is None else list(shape)}" for name, shape in shapes.items()
        )
        number = {3: "three", 4: "four"}.get(dimensions)
        wanted = f"[experts, ...] of {number} dimensions for the same experts" if number else "of two dimensions"
        raise Fp8Error(f"{name} cannot be converted: its layout names weights {wanted}, got {shapes_given}.")
