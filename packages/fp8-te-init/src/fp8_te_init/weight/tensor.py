"""`PrimaryFloat8Weight`: a tensor of a high-precision dtype on FP8 codes and scales.

Operators read the dequantized values, and views alias the codes. A write starts from the most exact known values (the
unrounded ones, else the master's, else the dequantized ones), applies the operator and quantizes the result. So every
initialization function works on it, and its result is preserved exactly. FSDP2 gathers the codes.
"""

import copy
import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import nn

from fp8_common import CastRecipe, Fp8Error, Fp8UnsupportedError
from fp8_common.torch import FLOAT8_DTYPES
from fp8_common.torch.compat import (
    OpOverload,
    base_of,
    disabled_torch_function,
    is_view,
    local_of,
    pytree,
    wrapper_of,
    written_tensors,
)
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid
from fp8_te_init.weight import all_gather
from fp8_te_init.weight.part import Part
from fp8_te_init.weight.state import WeightState

aten = torch.ops.aten
logger = logging.getLogger(__name__)

# The results of these operators are new FP8 weights.
_COPIES = {aten.clone.default, aten.empty_like.default, aten._pin_memory.default, aten._to_copy.default}
# These operators replace all values, so that no small change accumulates in rounded values.
_OVERWRITES = {aten.copy_, aten._foreach_copy_, aten.fill_, aten.zero_, aten._foreach_zero_}
# Namespaces of collectives, which cannot write the values of other ranks as codes.
_COLLECTIVES = ("c10d", "_c10d_functional", "symm_mem")


class _Traced:
    """Reference to a `WeightState` for compilers; their guards hold copies without it."""

    def __init__(self, state: WeightState) -> None:
        self.state: Any = state
        self.kind = state.part

    def __deepcopy__(self, memo: dict) -> "_Traced":
        twin = copy.copy(self)
        twin.state = None
        return twin


class PrimaryFloat8Weight(torch.Tensor):
    """Weight [rows, columns], or its local rows, that holds FP8 codes.

    `fp8_model_init` and `convert_linear` create it. Its dtype is a high-precision dtype: operators read dequantized
    values, and written values are quantized.

    Args:
        codes: uint8 view of `state.codes`.
        state: State of the storage, shared by all aliases.

    Examples:
        >>> import torch
        >>> from fp8_te_init import PrimaryFloat8Weight, fp8_model_init
        >>> with fp8_model_init():
        ...     weight = torch.nn.Linear(64, 32, dtype=torch.bfloat16).weight
        >>> isinstance(weight, PrimaryFloat8Weight)
        True
        >>> weight.dtype, weight.codes.dtype
        (torch.bfloat16, torch.float8_e4m3fn)
        >>> with torch.no_grad():
        ...     weight.fill_(0.5).dequantize().unique()
        tensor([0.5000], dtype=torch.bfloat16)
    """

    # Slots: copying `vars(parameter)` to another parameter must not keep codes and state alive.
    __slots__ = ("_codes", "_state")
    _codes: torch.Tensor
    _state: WeightState

    @staticmethod
    def __new__(
        cls: type,
        codes: torch.Tensor,
        state: WeightState | None = None,
        *,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> "PrimaryFloat8Weight":
        """Wrap `codes` without copying them.

        Loaders (accelerate's `init_empty_weights`) rebuild parameters as `type(p)(p.to(device), **p.__dict__)`. A
        weight that is passed as `codes` becomes a parameter on the same state; `attributes` are ignored.
        """
        if state is None or isinstance(codes, PrimaryFloat8Weight):
            rebuilt: Any = nn.Parameter(codes, requires_grad=requires_grad)
            return rebuilt
        # A wrapper without storage: only `__torch_dispatch__` reaches the codes. The wrapper has their strides and
        # offset, so that a view of the wrapper is the same view of the codes.
        self = wrapper_of(cls, codes, dtype=state.dtype)
        self._codes, self._state = codes, state
        return self

    # ------------------------------------------------------------ methods named as in TransformerEngine

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """Return the preserved unrounded values [n, columns] on the host, or None.

        The values are in the dtype in which they were written, and stay preserved.

        Raises:
            StaleInitError: If they do not quantize to the current codes.
        """
        return None if self._state.preserve_until is None else self._state.init_values()

    def clear_high_precision_init_val(self) -> None:
        """Drop the unrounded values, and preserve none from now on."""
        self._state.release()

    # ------------------------------------------------------------ other public methods

    @property
    def state(self) -> WeightState:
        """State of the storage, shared by all aliases."""
        return self._state

    @property
    def scale(self) -> torch.Tensor:
        """float32 scales into FP8: [], [rows, 1], or one per block."""
        return self._state.scale

    @property
    def codes(self) -> torch.Tensor:
        """Codes in torch's float8 dtype, shaped like this view; shares memory."""
        return self._codes.view(self._state.float8_codes.dtype)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the dequantized values as a plain tensor.

        Args:
            dtype: A floating-point dtype; the dtype of the weight by default.
        """
        if self.is_meta:
            return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        return self.view_of(self._state.all_values(dtype or self.dtype).contiguous())

    @property
    def data(self) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        """An alias outside of autograd.

        Setting it copies the given values, or codes, scales and unrounded values of another FP8 weight. Existing
        aliases keep the old values, like aliases of plain tensors.

        Raises:
            Fp8Error: If the new value has another shape, dtype or device or is a view of a larger buffer, or if this
                tensor is a view of a part of the weight.
        """
        return super().data

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if (self.shape, self.dtype, self.device) != (values.shape, values.dtype, values.device):
            raise Fp8Error(
                f"weight.data of an FP8 weight {tuple(self.shape)} of {self.dtype} on {self.device} takes values like "
                f"it, got {tuple(values.shape)} of {values.dtype} on {values.device}."
            )
        base = base_of(values)
        reshaped = base is not None and base.shape != values.shape
        if type(values) is torch.Tensor and (reshaped or values.untyped_storage().nbytes() > values.nbytes):
            raise Fp8Error(
                "weight.data of an FP8 weight cannot be a part of a larger buffer, or a view of a flat one: its codes "
                "would miss writes to it. Set a copy (values.clone())."
            )
        if not self.is_whole:
            raise Fp8Error("Set .data of the weight itself; this is a view of a part of it. Use copy_.")
        # The new state keeps the scales that the layer has as buffers; the state of old aliases gets copies.
        old = self._state
        new = old.with_codes(old.codes.clone(), master=old.master, previous_state=old.previous_state)
        old.previous_state = None
        loading = old.loading
        new.scale, new.history, old.scale, old.history = old.scale, old.history, new.scale, new.history
        for state in (new, old):
            state.mark_consistent()
        if loading:
            old.mark_scales_pending()
        self._codes, self._state = self.view_of(new.codes), new
        with torch.no_grad():
            self.copy_(values)

    def data_ptr(self) -> int:
        """Return the address of the codes.

        The tensor itself has no storage; other libraries use the address as an identity.
        """
        return self._codes.data_ptr()

    def share_memory_(self) -> "PrimaryFloat8Weight":
        """Raise, because writes of other processes to the codes would go unnoticed.

        Raises:
            Fp8UnsupportedError: Always.
        """
        raise Fp8UnsupportedError(
            "FP8 weights cannot be shared between processes: this process would miss another's writes. Share the "
            "float32 weights (export_fp32_state_dict) instead."
        )

    @property
    def is_whole(self) -> bool:
        """True if this view has all local rows, with or without padding."""
        codes = self._state.codes
        rows = self._codes.shape[0] if self._codes.ndim == codes.ndim else -1
        return self._codes.data_ptr() == codes.data_ptr() and rows in (self._state.rows, codes.shape[0])

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same view of a contiguous tensor with the storage's shape."""
        offset = self._codes.storage_offset() - self._state.codes.storage_offset()
        return whole.as_strided(self._codes.shape, self._codes.stride(), whole.storage_offset() + offset)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return shape, format and dtype as text."""
        return f"PrimaryFloat8Weight(shape={tuple(self.shape)}, {self._state.cast.format}, dtype={self.dtype})"

    # ------------------------------------------------------------ copies and pickles

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle codes, scales and history, without unrounded values."""
        state = self._state
        fields: dict[str, Any] = {name: getattr(state, name) for name in ("codes", "scale", "history")}
        # `torch.load` accepts these types
        part = (state.cast.to_dict(), state.dtype, state.full_shape, state.part.first_row)
        trained = self.requires_grad if isinstance(self, nn.Parameter) else None
        return _rebuild, (part, fields, self._codes, trained)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Copy codes and scales; keep aliases, buffers and unrounded values."""
        if id(self) not in memo:
            state = self._state
            if id(state) not in memo:
                # buffers of a layer are copied after its parameters, and must become the tensors of the copied state
                twin = memo[id(state)] = state.with_codes(state.codes.clone())
                memo[id(state.scale)], memo[id(state.history)] = twin.scale, twin.history
            codes = self.view_of(memo[id(state)].codes)
            copied: torch.Tensor = PrimaryFloat8Weight(codes, memo[id(state)])
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Expose the codes to compilers."""
        return ["_codes"], _Traced(self._state)

    @staticmethod
    def __tensor_unflatten__(inner: dict, traced: Any, size: Any, stride: Any) -> "PrimaryFloat8Weight":
        """Rebuild the weight from `__tensor_flatten__`."""
        return PrimaryFloat8Weight(inner["_codes"], traced.state)

    @classmethod
    def __metadata_guard__(cls, traced: Any, present: Any) -> bool:
        """Compare cast, dtype and shape, on which compiled code depends."""
        return traced.kind == present.kind

    # ------------------------------------------------------------ operators

    # `__torch_dispatch__` selects the result types; the default would wrap the result of every operator in this class.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Keep views and copies FP8, quantize writes, dequantize for other operators."""
        kwargs, first = kwargs or {}, args[0] if args else None
        # first, because codes are copied directly, while every other `copy_` provides values
        if func is aten.copy_.default and isinstance(first, cls) and _is_codes(args[1]):
            return _copy_codes(first, args[1])
        written: Any = [w for w in written_tensors(func, args, kwargs) if isinstance(w, cls)]
        if func is torch.ops.c10d.broadcast_.default and isinstance(args[0][0], cls) and args[0][0].is_whole:
            return _broadcast(func, args, kwargs)
        if written and func.namespace in _COLLECTIVES:
            raise Fp8Error(
                f"{func} would write to an FP8 weight, whose codes cannot be summed or filled by other ranks. Use "
                "broadcast_weights_, reduce gradients or masters, or gather weight.dequantize()."
            )
        if written:
            return _write(func, args, kwargs, written)
        if isinstance(first, cls) and is_view(func) and func is not aten.view.dtype:
            # the wrapper and its codes have equal shapes and strides, so that every view is the same view of the codes
            result = func(first._codes, *args[1:], **kwargs)
            with torch.inference_mode(first.is_inference()):  # views of normal tensors stay normal
                return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, first._state), result)
        result = _fp8_result(first, func, args[1:], kwargs) if isinstance(first, cls) else None
        if result is not None:
            return result
        args, kwargs = pytree.tree_map_only(cls, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)

    fsdp_pre_all_gather = all_gather.pre_all_gather
    fsdp_post_all_gather = all_gather.post_all_gather


def primary_of(tensor: object) -> PrimaryFloat8Weight | None:
    """Return the local FP8 weight of a parameter or DTensor, else None."""
    local = local_of(tensor)
    return local if isinstance(local, PrimaryFloat8Weight) else None


def _is_codes(source: object) -> bool:
    return isinstance(source, PrimaryFloat8Weight) or (
        isinstance(source, torch.Tensor) and source.dtype in (torch.uint8, *FLOAT8_DTYPES)
    )


def _copy_codes(target: PrimaryFloat8Weight, source: torch.Tensor) -> PrimaryFloat8Weight:
    """Copy codes, or the state of another FP8 weight, to a weight.

    Args:
        target: The weight.
        source: uint8 or float8 codes, whose scales must be written next, or another FP8 weight.

    Raises:
        Fp8Error: If the codes have a float8 dtype.
    """
    stored = target._state
    if not isinstance(source, PrimaryFloat8Weight):
        if source.dtype != torch.uint8:
            raise Fp8Error(
                f"FP8 weights take codes as uint8, got {source.dtype}: view them as bytes (codes.view(torch.uint8)), "
                "and give the scales that belong to them too."
            )
        stored.save_previous_state()
        target._codes.copy_(source.squeeze(1) if source.ndim == target.ndim + 1 else source)
        stored.mark_scales_pending()
        return target
    other = source._state
    if stored is other:
        target._codes.copy_(source._codes)
        return target
    # FSDP2 shards a weight by copying a view of its rows into a padded tensor of `new_zeros`: the offset of the view in
    # its storage gives the row indices.
    columns = max(1, other.full_shape[1])
    row, inside = divmod(int(source._codes.storage_offset() - other.codes.storage_offset()), columns)
    rows_alone = inside == 0 and source._codes.shape[1:] == other.codes.shape[1:]
    fresh = stored.first_row >= stored.full_shape[0]
    if (stored.cast, stored.full_shape) != (other.cast, other.full_shape) or not (
        rows_alone and (fresh or (target.is_whole and source.shape == target.shape))
    ):
        return _write(aten.copy_.default, (target, source.dequantize()), {}, [target])
    stored.copy_rows(other, row)
    return target


def _broadcast(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Broadcast codes, scales and history of a whole weight.

    Layer-wise optimizers call it after a step. On ranks whose weight changes, the master restarts from its new values.
    """
    state = args[0][0].state
    tensors = [state.codes, state.scale, *([] if state.history is None else [state.history])]
    before = state.with_codes(state.codes.clone())
    for tensor in tensors[:-1]:
        func([tensor], *args[1:], **kwargs)[1].wait()
    done = func(tensors[-1:], *args[1:], **kwargs)[1]
    done.wait()
    state.mark_consistent()
    if not before.holds_codes_of(state):
        state.unrounded = state.previous_state = None
        state.follow_codes()
    return args[0], done


def _fp8_result(weight: PrimaryFloat8Weight, func: Any, rest: tuple, kwargs: dict) -> PrimaryFloat8Weight | None:
    """Return the result of an operator that keeps FP8, None for others."""
    state, options = weight._state, {name: value for name, value in kwargs.items() if name != "dtype"}
    if kwargs.get("dtype") not in (None, weight.dtype):
        return None
    if func is aten.new_zeros.default and torch.Size(rest[0])[1:] == state.full_shape[1:]:
        # FSDP2 creates the padded tensor of its shard in this way, and copies rows to it later, if there are any. The
        # scales stay the same tensors, because they are buffers of the layer.
        state.follow_loads()
        codes = func(weight._codes, rest[0], *rest[1:], **options)
        unrounded = None if state.unrounded is None else state.unrounded[:0]
        shard = dataclasses.replace(
            state,
            codes=codes,
            part=dataclasses.replace(state.part, first_row=state.full_shape[0]),
            unrounded=unrounded,
            gather_requires=state.gather_requires or "check",
            master=state.master if state.sharded else None,
            previous_state=None,
            last_consistent=None,
        )
        if state.loading:
            shard.mark_scales_pending()
        return PrimaryFloat8Weight(codes, shard)
    if func not in _COPIES or not weight.is_whole:
        return None
    changes: dict[str, Any] = {}
    if func is aten.empty_like.default:
        changes = {"unrounded": None, "gather_requires": None}
    fresh = state.with_codes(func(state.codes, *rest, **options), **changes)
    return PrimaryFloat8Weight(weight.view_of(fresh.codes), fresh)


def _write(func: Any, args: tuple, kwargs: dict, written: list[PrimaryFloat8Weight]) -> Any:
    """Run an operator that writes to weights on values; quantize the results."""
    # one buffer of values for each storage: several views of it in one operator (foreach) must see each other's writes
    states = {id(weight._state): weight._state for weight in written}
    if any(state.codes.is_meta for state in states.values()):
        return args[0]
    replaces = func.overloadpacket in _OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags
    if not replaces:
        _warn_if_codes_only(func, list(states.values()))
    values = {key: _values_to_change(state, replaces) for key, state in states.items()}

    def plain(weight: PrimaryFloat8Weight) -> torch.Tensor:
        whole = values.get(id(weight._state))
        return weight.dequantize() if whole is None else weight.view_of(whole)

    plain_args, plain_kwargs = pytree.tree_map_only(PrimaryFloat8Weight, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for key, state in states.items():
        state.write(values[key][: state.rows], replaces=replaces)
    # in-place operators return their first argument
    return args[0] if isinstance(result, torch.Tensor) and isinstance(args[0], PrimaryFloat8Weight) else result


def _values_to_change(state: WeightState, replaces: bool) -> torch.Tensor:
    """Return the values before a write, zero-padded to the storage's shape."""
    best = state.values(state.dtype) if state.problem is not None else state.best_values()
    # Unrounded values and masters may have more bits than the dtype of the weight; these bits are kept.
    known = state.unrounded is not None or not (replaces or state.live_master is None)
    dtype = torch.promote_types(best.dtype, state.dtype) if known else state.dtype
    whole = torch.zeros(state.codes.shape, dtype=dtype, device=state.device)
    whole[: state.rows] = best
    return whole


def _warn_if_codes_only(func: Any, states: list[WeightState]) -> None:
    """Warn if an operator changes a weight with codes alone."""
    if any(state.unrounded is None and state.live_master is None for state in states):
        warn_of_rounding(func.overloadpacket.__name__)


@functools.cache
def warn_of_rounding(name: str) -> None:
    """Warn, once for each operator, that each change is rounded."""
    logger.warning(
        "%s changed an FP8 weight of which codes alone are known: each such change is rounded to 8 bits, and small "
        "ones are lost. Train with MasterOptimizer(AdamW, model.parameters(), ...).",
        name,
    )


def _rebuild(part: tuple, fields: dict[str, Any], codes: torch.Tensor, trained: bool | None) -> torch.Tensor:
    """Rebuild a pickled weight, a parameter unless `trained` is None."""
    cast, dtype, full_shape, first_row = part
    grid = ScaleGrid(CastRecipe.from_dict(cast))
    identity = Part(grid=grid, dtype=dtype, full_shape=full_shape, first_row=first_row)
    requirement = None if first_row is None else "check"
    weight = PrimaryFloat8Weight(codes, WeightState(part=identity, gather_requires=requirement, **fields))
    return weight if trained is None else nn.Parameter(weight, requires_grad=trained)


torch.serialization.add_safe_globals([_rebuild])
