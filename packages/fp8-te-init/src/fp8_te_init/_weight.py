"""`PrimaryFloat8Weight`: a tensor of a high-precision dtype that holds FP8 codes and scales, nothing else.

Reading it in any operator gives the dequantized values; views alias the codes. Writing to it means: take the kept
high-precision values (dequantize where there are none), apply the operator to them, quantize again. So every
initialisation function works on it, and what it makes is kept exactly. FSDP2 gathers the codes.
"""

import copy
import logging
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fp8_common import CastRecipe, Fp8Error, Fp8StaleError
from fp8_common.torch import FLOAT8_DTYPES, torch_dtype
from fp8_common.torch.plugin import GatheredFloat8Weight, fsdp, tensor_subclass
from fp8_te_init import _wire as wire
from fp8_te_init._collectives import broadcast_for_ddp, is_collective, refuse_in_lists, refuse_or_broadcast
from fp8_te_init._compat import is_distributing
from fp8_te_init._config import GatherFormat
from fp8_te_init._init_replay import InitReplay
from fp8_te_init._kept_values import keeper
from fp8_te_init._native_rows import NativeRows
from fp8_te_init._replacement import check_replacement
from fp8_te_init._state import PrimaryState

aten = torch.ops.aten
logger = logging.getLogger(__name__)

_CODES = (torch.uint8, *FLOAT8_DTYPES)
_OVERWRITES = {aten.copy_, aten._foreach_copy_, aten.fill_, aten.zero_, aten._foreach_zero_}
_COPIES = {aten.clone.default, aten.empty_like.default, aten._pin_memory.default}


class _Traced:
    """A state as compilers see it. Their guards keep copies, which hold what code depends on and no state."""

    def __init__(self, state: PrimaryState) -> None:
        self.state: Any = state
        self.kind = state.cast, state.full_shape, state.part

    def __deepcopy__(self, memo: dict) -> "_Traced":
        twin = copy.copy(self)
        twin.state = None
        return twin


class PrimaryFloat8Weight(torch.Tensor):
    """A weight [rows, columns], or this rank's rows of it, as FP8 codes; reports the dtype it stands for.

    A stacked weight [experts, rows, columns] is cut along its experts.

    Args:
        codes: uint8 view of `state.codes`.
        state: What is known about the storage.
        dtype: float32, bfloat16 or float16: the dtype of its gradient and of the values it was made from.
    """

    _codes: torch.Tensor
    _state: PrimaryState

    @staticmethod
    def __new__(
        cls: type,
        codes: torch.Tensor,
        state: PrimaryState | None = None,
        dtype: torch.dtype | None = None,
        *,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> "PrimaryFloat8Weight":
        """Wrap `codes` without copying them.

        Loaders (accelerate's `init_empty_weights`) rebuild parameters as `type(p)(p.to(device), **p.__dict__)`: a
        weight in place of codes is made a parameter as it is, and the attributes are left to their owners.
        """
        if state is None or isinstance(codes, PrimaryFloat8Weight):
            rebuilt: Any = nn.Parameter(codes, requires_grad=requires_grad)
            return rebuilt
        # A wrapper without storage: autograd and FSDP2 see a tensor of `dtype`, and only `__torch_dispatch__` reaches
        # the codes. Strides and offset are those of the codes: a view of this tensor is the same view of them.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            codes.size(),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
        )
        self._codes, self._state = codes, state
        return self

    @classmethod
    def empty(
        cls,
        shape: torch.Size,
        cast: CastRecipe,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gather: GatherFormat = "fp8",
    ) -> "PrimaryFloat8Weight":
        """Return a whole weight of zeros."""
        state = PrimaryState.empty(shape, cast, gather, device)
        return cls(state.codes, state, dtype)

    @property
    def dtype(self) -> torch.dtype:  # pyrefly: ignore[bad-override]
        """The dtype of its values and its gradient."""
        refuse_in_lists(self, sys._getframe(1))
        return super().dtype

    @property
    def data(self) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        """An alias outside of autograd. Setting it takes over values, or another FP8 weight's codes.

        Raises:
            Fp8Error: What is set has another shape, dtype or device, or is a view of a larger buffer.
        """
        return super().data

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        # torch would change shape and dtype of the wrapper, and leave the codes as they are
        check_replacement(self, values)
        if isinstance(values, PrimaryFloat8Weight) and values.state is self.state:
            return
        with torch.no_grad():
            # `copy_` writes to the codes in place: aliases and FSDP2 go on seeing this weight.
            self.copy_(values)

    @property
    def state(self) -> PrimaryState:
        """What is known about the storage."""
        return self._state

    @property
    def codes(self) -> torch.Tensor:
        """The codes in the format's dtype, sharing storage; to read."""
        return self._codes.view(torch_dtype(self._state.cast.format))

    @property
    def scale(self) -> torch.Tensor:
        """float32 scales of the whole weight, into FP8."""
        return self._state.scale

    @property
    def quantized_rows(self) -> NativeRows:
        """The rows held here, as sources of high-precision values see them."""
        return NativeRows(self._state, self.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of what its storage holds, in its own shape."""
        own = self._state.codes
        # FSDP2 holds its shard as a view of the rows without padding, so both numbers of rows are the whole.
        return self._codes.ndim == own.ndim and self._codes.data_ptr() == own.data_ptr() and self._covers_rows()

    @property
    def is_all_of_its_storage(self) -> bool:
        """Whether this is all of what its storage holds, in any shape."""
        own, codes = self._state.codes, self._codes
        count = self._state.rows * own.shape[1:].numel()
        return codes.data_ptr() == own.data_ptr() and codes.is_contiguous() and codes.numel() in (count, own.numel())

    def _covers_rows(self) -> bool:
        return self._codes.shape[0] in (self._state.rows, self._state.codes.shape[0])

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        """Return the values in `dtype`, by default this tensor's: codes times RN32(1 / scale)."""
        return self._geometry(self._state.values(dtype or self.dtype))

    def _geometry(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of the storage's shape that this view shows."""
        if self._codes.shape == whole.shape:
            return whole
        # Values lie like the codes once they are contiguous, so that the view of one is a view of the other.
        offset = self._codes.storage_offset() - self._state.codes.storage_offset()
        return whole.contiguous().as_strided(self._codes.shape, self._codes.stride(), offset)

    def standing_for(self, dtype: torch.dtype) -> "PrimaryFloat8Weight":
        """Return the same codes with another dtype of values and gradient."""
        return PrimaryFloat8Weight(self._codes, self._state, dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show shape and format."""
        return f"PrimaryFloat8Weight(shape={tuple(self.shape)}, {self._state.cast.format}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle codes and scales; kept high-precision values stay behind."""
        state = self._state
        place = (state.full_shape, state.first_row, state.part)
        fields = (state.cast, state.codes, state.scale, place, state.sharded, state.gather)
        view = (tuple(self.shape), self._codes.stride(), self._codes.storage_offset() - state.codes.storage_offset())
        # A parameter of a subclass has the class of the subclass and a flag (`_is_param`), which would not be pickled.
        trained = self.requires_grad if isinstance(self, nn.Parameter) else None
        return _rebuild, (fields, state.history, view, self.dtype, trained)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Copy codes and scales. A module that is copied brings its kept values along."""
        if id(self) in memo:
            return memo[id(self)]
        # Through the memo: aliases of one storage have one state, and stay aliases.
        state = copy.deepcopy(self._state, memo)
        twin: torch.Tensor = PrimaryFloat8Weight(self._geometry(state.codes), state, self.dtype)
        if isinstance(self, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        """Expose the codes to the compiler."""
        return ["_codes"], (_Traced(self._state), self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "PrimaryFloat8Weight":
        """Rebuild from `__tensor_flatten__`."""
        traced, dtype = context
        return PrimaryFloat8Weight(inner["_codes"], traced.state, dtype)

    @classmethod
    def __metadata_guard__(cls, traced: tuple, present: tuple) -> bool:
        """Tell the compiler that code which reads shapes and dtypes depends on these, not on codes and scales."""
        return (traced[0].kind, traced[1]) == (present[0].kind, present[1])

    # Everything is decided in `__torch_dispatch__`; the default would wrap the result of every operator in this class.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Views and copies keep codes, writes quantize again, everything else sees dequantized values."""
        kwargs = kwargs or {}
        # Before the check for writes, which would run the collective on dequantized copies.
        if is_collective(func):
            done = refuse_or_broadcast(func, args, kwargs, cls)
            if done is not None:
                return done
        if func is aten.detach.default and dist.is_initialized():
            # torch scatters by address, which wrappers have none of; a layer that gets the result takes up its codes
            if is_distributing(sys._getframe(1)):
                return _values_of(args[0])
            # DDP detaches every parameter right before it broadcasts flattened copies: the last moment to broadcast
            # codes.
            broadcast_for_ddp(args[0])
        # Before the check for writes too: codes are taken over as they are, every other `copy_` brings values.
        if func is aten.copy_.default and isinstance(args[0], cls) and _is_codes(args[1]):
            return _copy_codes(args[0], args[1])
        if any(True for _ in _written(func, args, kwargs)):
            return _write(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, cls):
            # The codes have one byte for each element, so that a view by shape and strides is the same view of them.
            if tensor_subclass.is_view(func):
                result = func(first._codes, *args[1:], **kwargs)
                # a view of a normal tensor is one, in inference mode too: torch gives it the version of the weight
                with torch.inference_mode(first.is_inference()):
                    return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, first._state, first.dtype), result)
            copied = _copied(first, func, args[1:], kwargs)
            if copied is not None:
                return copied
        # A plain result: nothing that is computed from a weight is a weight.
        args, kwargs = pytree.tree_map_only(cls, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return the uint8 buffer of this shard, and what `fsdp_post_all_gather` needs besides."""
        # In this order: `send` may agree on another scale, which is then the one that is read.
        return wire.send(self, self._state, mesh), (self._state.scale, self._state)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Make the gathered weight from the buffers of all ranks, or bring an existing one up to date."""
        scale, state = metadata
        target: Any = None if out is None else getattr(out, "_local_tensor", out)
        own_scale = state.scale_of_all_rows(scale).contiguous()
        if target is not None and state.gather == "fp8":
            fsdp.refill(target.scale, own_scale)  # FSDP2 has refilled the buffer that the codes alias
            return None
        # From here on: the first gather, or one of values. FSDP2 passes `out`, which it keeps, from the second one on.
        codes = wire.receive(all_gather_outputs[0], state, scale)
        if target is not None:
            fsdp.refill(target.codes.view(torch.uint8), codes.view(torch.uint8))
            fsdp.refill(target.scale, own_scale)
            return None
        # A clone of the scale: later gathers write to it (`refill`), and the state's own is shared.
        gathered = GatheredFloat8Weight(codes, own_scale.clone(), state.cast.format, param_dtype, state.layout.block)
        # The second part is what FSDP2 frees on reshard, and allocates again, besides the gathered buffers. Codes in
        # FP8 are such a buffer already; codes that were made from gathered values have memory of their own.
        return gathered, () if state.gather == "fp8" else (codes,)


def primary_of(tensor: object) -> PrimaryFloat8Weight | None:
    """Return the primary weight behind a parameter, the local one of a DTensor; None if there is none."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if isinstance(local, PrimaryFloat8Weight) else None


def _values_of(weight: PrimaryFloat8Weight) -> torch.Tensor:
    if weight.is_meta:
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return weight.dequantize()


def _is_codes(source: object) -> bool:
    return isinstance(source, PrimaryFloat8Weight) or (isinstance(source, torch.Tensor) and source.dtype in _CODES)


def _copy_codes(target: PrimaryFloat8Weight, source: torch.Tensor) -> PrimaryFloat8Weight:
    """Take over codes, and from another primary weight also scales and the place of its rows."""
    # Also if the codes are equal: a MasterOptimizer compares before it starts a master anew.
    target._state.writes += 1
    if not isinstance(source, PrimaryFloat8Weight):
        if source.dtype not in (torch.uint8, target.codes.dtype):
            raise Fp8Error(
                f"Codes of {source.dtype} were copied to an FP8 weight of {target.codes.dtype}: they would mean other "
                "values. Use a model with the recipe that they were saved under."
            )
        target._codes.copy_(source.view(torch.uint8))
        target._state.unscaled = True
        return target
    mine, other = target._state, source._state
    if (mine.cast, mine.full_shape, mine.part) != (other.cast, other.full_shape, other.part):
        return _write(aten.copy_.default, (target, source.dequantize()), {})
    target._codes.copy_(source._codes)
    mine.scale, mine.history, mine.unscaled = other.scale, other.history, other.unscaled
    if mine is not other and target._codes.ndim == mine.codes.ndim:
        # FSDP2 cuts a weight by copying a view of its rows into a padded tensor of `new_zeros`: the place of the view
        # in its storage tells which rows these are.
        row = (source._codes.storage_offset() - other.codes.storage_offset()) // max(1, other.codes.shape[1:].numel())
        mine.first_row, mine.unagreed = other.first_row + row, other.unagreed
        mine.held = None if other.held is None else other.held[row : row + mine.rows].clone()
    return target


def _copied(weight: PrimaryFloat8Weight, func: Any, rest: tuple, kwargs: dict) -> PrimaryFloat8Weight | None:
    """Return the result of an operator that makes another primary weight; None if it makes a plain tensor."""
    state, device_only = weight._state, {k: v for k, v in kwargs.items() if k != "dtype"}
    asked = kwargs.get("dtype")
    if func is aten.new_zeros.default:
        size = torch.Size(rest[0])
        if asked not in (None, weight.dtype) or size[1:] != state.full_shape[1:]:
            return None
        # FSDP2 makes the padded tensor for its shard with this operator. The dtype is dropped: codes stay uint8.
        fresh = state.around(func(weight._codes, size, *rest[1:], **device_only), sharded=True)
        fresh.first_row = state.full_shape[0]  # no row of the weight yet: `copy_` says which come here
        return PrimaryFloat8Weight(fresh.codes, fresh, weight.dtype)
    moves = func is aten._to_copy.default and asked in (None, weight.dtype)
    if not (moves or func in _COPIES) or not weight.is_whole or asked not in (None, weight.dtype):
        return None
    fresh = state.around(func(state.codes, *rest, **device_only))  # the padding comes along
    if func is not aten.empty_like.default:
        fresh.unagreed = state.unagreed
        fresh.held = None if state.held is None else state.held.to(fresh.codes.device, copy=True)
    return PrimaryFloat8Weight(weight._geometry(fresh.codes), fresh, weight.dtype)


def _written(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Iterator[PrimaryFloat8Weight]:
    """Yield every primary weight that the operator writes to."""
    written = tensor_subclass.written_tensors(func, args, kwargs)
    return (tensor for tensor in written if isinstance(tensor, PrimaryFloat8Weight))


def _write(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run an operator on the values behind the weights that it writes to, then quantize them again."""
    # By state and not by tensor: two views of one storage in one operator (foreach) have to see each other's writes.
    written = {id(w._state): w for w in _written(func, args, kwargs)}
    if any(w.is_meta for w in written.values()):
        return args[0]
    # Otherwise kept values would be lost to rounded ones, and a current scale be made anew from them.
    if func is aten.copy_.default and _holds_already(args[0], args[1]):
        return args[0]
    _tell_of_rounding(func, written.values())
    values = {key: _current_values(w) for key, w in written.items()}
    # Before the operator runs: the replay takes the state of the generator.
    replay = _replay_of(func, args, kwargs, next(iter(written.values())))

    def plain(weight: PrimaryFloat8Weight) -> torch.Tensor:
        whole = values.get(id(weight._state))
        return weight.dequantize() if whole is None else weight._geometry(whole)

    plain_args, plain_kwargs = pytree.tree_map_only(PrimaryFloat8Weight, plain, (args, kwargs))
    # Writes to `values`, of which `plain` gave views: what was written is then in the whole of each storage.
    result = func(*plain_args, **plain_kwargs)
    for key, weight in written.items():
        state = weight._state
        state.writes += 1
        state.write(values[key], keeper(state.kept, weight.quantized_rows, replay))
    # In-place operators return the very tensor that they were called on.
    return args[0] if isinstance(result, torch.Tensor) and isinstance(args[0], PrimaryFloat8Weight) else result


def _tell_of_rounding(func: torch._ops.OpOverload, weights: Iterable[PrimaryFloat8Weight]) -> None:
    """Warn, once for each weight, of an operator that adds to rounded values: averages, optimizers without masters."""
    # These replace all values, or draw new ones: nothing accumulates that rounding could lose.
    if func.overloadpacket in _OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags:
        return
    rounded = [w._state for w in weights if w._state.is_rounded and not w._state.told]
    for state in rounded:
        state.told = True
    if rounded:
        logger.warning(
            "%s changed %d FP8 weights of which nothing but codes is kept: each such change is rounded to 8 bits, and "
            "small ones are lost. Change or average the float32 masters instead (MasterOptimizer.masters, write_back), "
            'or keep the values with primary_weights(release="manual").',
            func.overloadpacket.__name__,
            len(rounded),
        )


def _holds_already(weight: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a weight holds exactly these values: writing them then leaves codes, scales and kept values.

    So a dequantized copy that is put back (by DDP, or after an evaluation with other weights) loses nothing.
    """
    if not isinstance(weight, PrimaryFloat8Weight) or isinstance(values, PrimaryFloat8Weight):
        return False
    if weight.state.sharded:
        return False  # other ranks' rows may change: then all of them have to agree on a scale
    if values.dtype != weight.dtype or values.shape != weight.shape or values.device != weight.device:
        return False
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16  # 0 and -0 have codes of their own
    return torch.equal(weight.dequantize().contiguous().view(bits), values.contiguous().view(bits))


def _current_values(weight: PrimaryFloat8Weight) -> torch.Tensor:
    """Return what a write starts from, [rows, columns] of the storage: the kept values, else the dequantized ones."""
    state = weight._state
    kept = state.held
    if kept is None and state.kept is not None:
        try:
            kept = state.kept.values(weight.quantized_rows)
        except Fp8StaleError:
            kept = None
    if kept is None:
        return state.values(weight.dtype).contiguous()
    # values of a weight that stands for more bits now (`.float()`) must not be rounded to those of before
    wider = torch.promote_types(kept.dtype, weight.dtype)
    # Of the shape of the storage, because the operator may see a view of it; zeros where there is padding.
    whole = torch.zeros(state.codes.shape, dtype=wider, device=state.codes.device)
    whole[: state.rows] = kept
    return whole


def _replay_of(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict, weight: PrimaryFloat8Weight
) -> InitReplay | None:
    """Return how to repeat this write, if it is of a kind that can be repeated."""
    kept = weight._state.kept
    if (
        kept is None
        or not kept.wants_replay
        or weight.state.codes.ndim != 2
        or args[0] is not weight
        or not weight.is_whole
    ):
        return None
    rows = weight._state.place_of_rows(weight._state.first_row, weight._codes.shape[0])
    return InitReplay.record(kept.replay, func, args[1:], kwargs, device=weight.device, rows=rows)


def _rebuild(
    fields: tuple, history: torch.Tensor | None, view: tuple, dtype: torch.dtype, trained: bool | None
) -> torch.Tensor:
    cast, codes, scale, (full_shape, first_row, part), sharded, gather = fields
    state = PrimaryState(
        cast=cast,
        codes=codes,
        scale=scale,
        full_shape=full_shape,
        first_row=first_row,
        part=part,
        sharded=sharded,
        gather=gather,
        history=history,
    )
    shape, stride, offset = view
    flat = codes.as_strided(shape, stride, codes.storage_offset() + offset) if math.prod(shape) else codes[:0]
    weight = PrimaryFloat8Weight(flat, state, dtype)
    return weight if trained is None else nn.Parameter(weight, requires_grad=trained)
