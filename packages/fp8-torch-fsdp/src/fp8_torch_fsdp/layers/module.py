"""`Float8Module`: a module with FP8 matmuls, created by changing a module's class.

Communication inside of a module's forward is defined by its `ParallelStrategy`. FSDP2 gathers outside of it and uses
the default strategy; tensor parallelism and `fully_shard_traceable` have their own strategies.
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
from fp8_common.torch.planned_casts import PlannedCast, plan_cast
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import Gather, LinearSpec, fp8_linear
from fp8_common.torch_layers.linear.plan import PlanCache
from fp8_common.torch_layers.sharding.gathered import GatheredWeight, quantized
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_torch_fsdp.all_gather.fsdp1 import raise_if_fsdp1
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.all_gather.state_dict import forget_state_dict_hooks, keep_state_dicts_plain
from fp8_torch_fsdp.config import Float8TrainingConfig
from fp8_torch_fsdp.layers.rebind_forward import rebind
from fp8_torch_fsdp.scales.delayed import DelayedScale
from fp8_torch_fsdp.scales.weight import Fp8Weight

SCALED_OPERANDS = ("input", "weight", "grad_output")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """Weights of a module, and its forward.

    Attributes:
        forward: Function of the converted module and the inputs of its forward; returns the outputs.
        weights: Names of the parameters, [..., out_features, in_features].
        transposed: Whether the parameters are [..., in_features, out_features] instead.
        stacked: Whether the parameters are stacks, [experts, ...].
        projections: Whether each expert has several matrices, [experts, projections, out_features, in_features], which
            the forward multiplies as one. FSDP2 gathers them in high precision.
    """

    forward: Callable[..., Any]
    weights: tuple[str, ...] = ("weight",)
    transposed: bool = False
    stacked: bool = False
    projections: bool = False


class ParallelStrategy:
    """Communication of a module with other ranks during its forward and backward.

    This class is the default strategy, without communication: all parameters are whole when the module computes. FSDP2
    uses it, too, because it gathers before the forward and before the backward.
    """

    gather: Gather | None = None
    """Gather of the whole weight for each matmul; None if the weight is whole already."""

    # read-only, because all modules share it
    cast_options: Mapping[str, Any] = MappingProxyType({})
    """Options of `Fp8Weight.whole` for a weight whose other parts are on other ranks."""

    def forward(self, layer: Any, input: torch.Tensor) -> torch.Tensor:
        """Return the output of a linear layer for `input`; see `Float8Linear.forward`."""
        output, bias = layer.fp8_matmul("weight", input, layer.weight), layer.bias
        return output if bias is None else with_bias(output, bias)

    def __deepcopy__(self, memo: dict) -> "ParallelStrategy":
        """Return the same strategy: a copied layer communicates with the same ranks."""
        return self


DEFAULT_STRATEGY = ParallelStrategy()
"""Strategy without communication, shared by all modules."""


class WeightMatmul:
    """The three matmuls of one weight, or of one stack of weights.

    Args:
        config: Configuration of casts and matmuls.
        layout: Layout of the weight.
        scales: Delayed scales by name of the operand, for operands with delayed scaling.
        owner: Name of the module's class, for errors.

    Attributes:
        config: Configuration of casts and matmuls.
        layout: Layout of the weight.
        scales: Delayed scales by name of the operand.
        weight: State of the weight; layers that share a weight share its state.
        cast_options: Options of `Fp8Weight.whole` for a weight whose other parts are on other ranks.
        planned_casts: Casts of the weight to both layouts, by shape, dtype and device.
        can_plan: Whether planned casts support the layout of the weight.
        spec: Static inputs of `fp8_linear`.
        rows_per_expert: Average number of rows per expert in the last eager forward; None before, and for weights that
            are not stacks.
    """

    def __init__(self, config: LinearConfig, layout: WeightLayout, scales: dict[str, DelayedScale], owner: str) -> None:
        self.config, self.layout, self.scales = config, layout, scales
        self.rows_per_expert: float | None = None
        self.cast_options: Mapping[str, Any] = {}
        self.planned_casts: PlanCache[PlannedCast | None] = PlanCache()
        # The output features of a transposed weight are columns, and planned casts scale rows.
        self.can_plan = not (layout.transposed and config.weight.granularity == "rowwise")
        # A static scale is shared by all experts.
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
        """Copy with the copied module's delayed scales, and without a watcher."""
        scales = {name: copy.deepcopy(scale, memo) for name, scale in self.scales.items()}
        copied = WeightMatmul(self.config, self.layout, scales, self.spec.name)
        copied.weight = copy.deepcopy(self.weight, memo)
        copied.cast_options, copied._unwatched = (
            self.cast_options,
            dataclasses.replace(copied.spec, gather=self.spec.gather),
        )
        copied.watch(None)
        return copied

    def watch(self, watcher: Callable[[str, torch.Tensor, Quantized], None] | None) -> None:
        """Call `watcher` for each cast of an input or output gradient.

        Rows in groups, and inputs that are codes already, are not watched. `Float8Monitor` uses it.

        Args:
            watcher: Function of the operand's name, its values [rows, columns] and the result of the cast. None removes
                the watcher.
        """
        # Compiled code is guarded on the identity of the spec, so the same object is restored.
        self.spec = self._unwatched if watcher is None else dataclasses.replace(self._unwatched, watch=watcher)

    def set_strategy(self, strategy: "ParallelStrategy") -> None:
        """Use the gather and the parts of `strategy`."""
        self.cast_options = strategy.cast_options
        self._unwatched = dataclasses.replace(self._unwatched, gather=strategy.gather)
        self.watch(self.spec.watch)

    def weight_operand(self, weight: torch.Tensor, record: bool, both: bool) -> Quantized:
        """Return the weight as an operand [..., out_features, in_features].

        Gathered codes are used directly; other weights are cast.

        Args:
            weight: Gathered, sharded or plain weight.
            record: Whether delayed scaling observes the weight.
            both: Whether to also return transposed codes, if one launch can write both.
        """
        if isinstance(weight, GatheredWeight):
            operand = quantized(weight)
        else:
            plain = weight.plain if isinstance(weight, ShardedFloat8Weight) else weight
            if self.weight.declared_unchanged and not torch.compiler.is_compiling():
                operand = self._held_operand(weight, plain, record)
            else:
                operand = self._quantized(plain, record, both)
        if self.layout.stacked and self.config.weight.granularity == "tensorwise":
            # one scale per expert, or a static scale for all experts
            scale_inv = operand.scale_inv.reshape(-1).expand(weight.shape[0])
            operand = Quantized(operand.codes, scale_inv, operand.fmt, operand.block)
        return operand.t() if self.layout.transposed else operand

    def _quantized(self, plain: torch.Tensor, record: bool, both: bool) -> Quantized:
        planned = self._planned_cast_of(plain) if both and self.can_plan and not self.cast_options else None
        if planned is not None and plain.is_contiguous():
            return planned(plain, self.scales.get("weight"), record)
        return self.weight.whole(plain, record=record, both=both, **self.cast_options)

    def _held_operand(self, weight: torch.Tensor, plain: torch.Tensor, record: bool) -> Quantized:
        """Return the held codes of a weight that is declared unchanged.

        They are in both layouts. A weight that was modified or replaced is cast again.
        """
        # Operators on a wrapper do not change the version of the wrapped tensor, but are counted in `writes`.
        writes = weight.fp8_weight.writes if isinstance(weight, ShardedFloat8Weight) else 0
        key = plain.data_ptr(), plain.shape, version_of(plain), writes
        held_codes = self.weight.held_codes
        if held_codes is None or held_codes[0] != key:
            # The weight is held, too, so that no other tensor gets its address.
            held_codes = self.weight.held_codes = key, self._quantized(plain, record, True), plain
        return held_codes[1]

    def _planned_cast_of(self, plain: torch.Tensor) -> PlannedCast | None:
        """Return the planned cast of a weight to both layouts, or None."""
        key = plain.shape, plain.dtype, plain.device, type(plain)
        if key not in self.planned_casts:
            self.planned_casts.keep(key, plan_cast(plain, plain.shape, self.config.weight, same_codes=True))
        return self.planned_casts[key]


class Float8Module(nn.Module):
    """Module whose matmuls with some of its parameters run in FP8.

    Converted modules are instances of this class and of their original class. Under FSDP2 the weights are gathered as
    FP8 codes, which the matmuls use directly. A module keeps its parameters, gradients, hooks and state dicts.

    Attributes:
        fp8: Matmuls of each weight, by name of the weight.
        fp8_config: Configuration of casts, matmuls and gathers.
        fp8_layout: Names and layout of the weights, and the forward.
        fp8_strategy: Communication with other ranks during forward and backward.
    """

    fp8: dict[str, WeightMatmul]
    fp8_config: Float8TrainingConfig
    fp8_layout: WeightLayout
    fp8_strategy: ParallelStrategy

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the forward of the original class with FP8 matmuls."""
        return self.fp8_layout.forward(self, *inputs, **options)

    @property
    def records(self) -> bool:
        """True if delayed scaling observes the current forward."""
        # An evaluation must not change the scales of training.
        return self.training and torch.is_grad_enabled()

    def fp8_matmul(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T, computed in FP8.

        Args:
            name: Name of the weight.
            x: float32, bfloat16 or float16 [..., in_features]; with `offsets`, [rows, in_features].
            weight: Gathered, sharded or plain weight of this name, or this rank's part of it.
            offsets: int32 or int64 [groups], index of the end of each group's rows; each group uses its matrix of a
                stack of weights. None for a single matrix.

        Returns:
            [..., out_features] in the dtype of `x` (the autocast dtype under autocast).

        Raises:
            Fp8Error: If shapes or offsets do not fit, the layout has no such weight, or the weight is distributed and
                not gathered.
        """
        keep_codes = self.keeps_codes(name, weight)
        y = fp8_linear(x, weight, self.fp8[name].spec, offsets, record=self.records, keep_codes=keep_codes)
        if offsets is not None and not torch.compiler.is_compiling():
            self.fp8[name].rows_per_expert = x.shape[0] / offsets.shape[0]  # for `float8_report`
        return y

    def keeps_codes(self, name: str, weight: torch.Tensor) -> bool:
        """Return whether the backward reuses the forward's codes of a weight.

        Raises:
            Fp8Error: If the layout has no such weight, or the weight is distributed and not gathered.
        """
        if name not in self.fp8:
            raise Fp8Error(f"{name!r} is not a weight of this module: its layout names {list(self.fp8)}.")
        if isinstance(weight, DTensor):
            raise Fp8Error(
                f"The weight {name} of {type(self).__name__} is distributed and not gathered. Call the model through "
                "the module that fully_shard was applied to; make linear layers tensor-parallel with "
                "Float8ColwiseParallel and Float8RowwiseParallel."
            )
        if torch.compiler.is_compiling():
            # For casts that compilers generate, they decide themselves whether to recompute them. Kernels of this
            # project would be launched again in the backward.
            cast = self.fp8_config.weight
            launched = cast.scaling != "static"
            return launched and not isinstance(weight, GatheredWeight) and self.fp8_strategy.gather is None
        if self.fp8_config.all_gather or self.fp8[name].scales:
            raise_if_fsdp1(weight)
        # FSDP2 frees other weights between forward and backward, where saved codes would take their place in memory. A
        # wrapper in this call is not sharded, and remains in memory.
        return isinstance(weight, ShardedFloat8Weight)

    def set_strategy(self, strategy: ParallelStrategy) -> None:
        """Set the communication of the module and its matmuls."""
        self.fp8_strategy = strategy
        for matmul in self.fp8.values():
            matmul.set_strategy(strategy)

    def extra_repr(self) -> str:
        """Return names and cast of the weights."""
        cast = self.fp8_config.weight
        each = " for each expert" * self.fp8_layout.stacked
        return f"{', '.join(self.fp8)}, fp8={cast.scaling} {cast.granularity} {cast.format}{each}"


_ADDED = ("fp8", "fp8_config", "fp8_layout", "fp8_strategy")
"""Attributes that conversion adds to a module, besides delayed scales."""


def to_fp8(module: Any, cls: type[Float8Module], layout: WeightLayout, config: Float8TrainingConfig) -> None:
    """Change a module's class to a subclass of `cls`, in place.

    Args:
        module: Module with the parameters that the layout names.
        cls: Additional base class of the converted module.
        layout: Names and layout of the weights, and the forward.
        config: Configuration of casts, matmuls and gathers.

    Raises:
        Fp8Error: If a weight is missing or has the wrong number of dimensions, weights differ in their number of
            experts, the recipe does not support the layout, or the class of the module cannot be changed.
    """
    _check(module, layout, config)
    before = type(module)
    try:
        module.__class__ = _fp8_class(cls, before)
    except TypeError as error:
        raise Fp8Error(
            f"The class {before.__name__} of a module cannot be changed ({error}). Exclude it with module_filter_fn."
        ) from error
    rebind(module, before)
    module.fp8_config, module.fp8_layout = config, layout
    module.fp8 = {}
    for name in layout.weights:
        weight = module._parameters[name]
        scales = {}
        for operand in SCALED_OPERANDS:
            state = _delayed(getattr(config, operand), config, operand, weight, stacked=layout.stacked)
            # None if the operand has no delayed scaling
            setattr(module, scale_name(module, operand, name), state)
            if state is not None:
                scales[operand] = state
        module.fp8[name] = WeightMatmul(config, layout, scales, type(module).__name__)
    module.set_strategy(DEFAULT_STRATEGY)
    keep_state_dicts_plain(module)


def to_original(module: Any) -> None:
    """Undo `to_fp8`; the weights do not change."""
    after = type(module)
    for name in module.fp8:
        for operand in SCALED_OPERANDS:
            delattr(module, scale_name(module, operand, name))
    for name in _ADDED:
        delattr(module, name)
    module.__class__ = original_class(after)
    rebind(module, after)
    forget_state_dict_hooks(module)


def scale_name(module: nn.Module, operand: str, weight: str) -> str:
    """Return the name of the attribute for an operand's delayed scale."""
    return f"fp8_{operand}" if isinstance(module, nn.Linear) else f"fp8_{operand}_{weight}"


def original_class(cls: type) -> Any:
    """Return the class that a module had before it was converted."""
    # The order is (generated class, Float8Linear, Float8Module, original class, ...).
    return next(base for base in cls.__mro__ if not issubclass(base, Float8Module))


def with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `output` [..., features] plus the bias in its dtype."""
    return output if bias is None else output + bias.to(output.dtype)


@cache
def _fp8_class(cls: type[Float8Module], original: type[nn.Module]) -> type[Float8Module]:
    """Return `cls`, or a subclass of `cls` and another original class."""
    # Cached, so that modules of one class are converted to one class, and share compiled code.
    if issubclass(cls, original):
        return cls
    return type(f"Float8{original.__name__}", (cls, original), {"__module__": original.__module__})


def _delayed(
    cast: CastRecipe, config: Float8TrainingConfig, operand: str, weight: torch.Tensor, *, stacked: bool
) -> DelayedScale | None:
    """Create the delayed scale of an operand; return None for other scaling.

    Operands of a stack of weights have one scale per expert.
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
    """Raise if a module's parameters do not match layout and recipe."""
    name = type(module).__name__
    if config.weight.granularity == "mx" and (layout.stacked or layout.transposed):
        raise Fp8Error(
            f"{name} cannot compute in MX: its weights are not [out_features, in_features]. Select another recipe, or "
            "leave it out with module_filter_fn."
        )
    if isinstance(module, nn.Linear):
        return
    shapes = {name: getattr(module._parameters.get(name), "shape", None) for name in layout.weights}
    dimensions = 2 + layout.stacked + layout.projections
    all_fit = all(shape is not None and len(shape) == dimensions and 0 not in shape for shape in shapes.values())
    experts = {shape[0] for shape in shapes.values() if shape}
    if not all_fit or (layout.stacked and len(experts) != 1):
        shapes_given = ", ".join(
            f"{name} {'missing' if shape is None else list(shape)}" for name, shape in shapes.items()
        )
        number = {3: "three", 4: "four"}.get(dimensions)
        expected = (
            f"[experts, ...] with {number} dimensions and equal numbers of experts" if number else "of two dimensions"
        )
        raise Fp8Error(f"{name} cannot be converted: its layout names weights {expected}, got {shapes_given}.")
