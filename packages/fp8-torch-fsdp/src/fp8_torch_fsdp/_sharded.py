"""`ShardedFloat8Weight`: an FP8 linear weight before the all-gather, a high-precision shard that tracks its changes.

It is the first of two life-cycle states; `GatheredFloat8Weight` is the other. Optimizers, checkpoints
and initialisation see an ordinary tensor of the original dtype; only FSDP2's all-gather sees FP8.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fp8_common import CastRecipe, Fp8Error, Fp8StaleError
from fp8_common.torch.plugin import GatheredFloat8Weight, dispatch, fsdp, tensor_subclass
from fp8_torch_fsdp._strategies import Strategy
from fp8_torch_fsdp._sync_plan import SyncPlan
from fp8_torch_fsdp._weight_state import WeightState

aten = torch.ops.aten

# Results of these hold new data of a weight (FSDP2 shards, moves and copies with them): still a weight, nothing known.
_MAKES_WEIGHT = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten.clone.default,
    aten._pin_memory.default,
}


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ShardedFloat8Weight(torch.Tensor):
    """A weight, or this rank's shard of it, in high precision; FSDP2 gathers it in FP8.

    Args:
        data: The plain tensor, float32, bfloat16 or float16 [rows, columns].
        state: What is known about it.
    """

    _data: torch.Tensor
    _state: WeightState

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, state: WeightState) -> "ShardedFloat8Weight":
        """Wrap `data` without copying it."""
        # A wrapper without storage: every operator comes to `__torch_dispatch__`, which is how writes are seen.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        self._data, self._state = data, state
        return self

    @classmethod
    def of(cls, data: torch.Tensor, strategy: Strategy) -> "ShardedFloat8Weight":
        """Wrap a plain weight that nothing is known about yet."""
        return cls(data, WeightState(strategy=strategy))

    @property
    def plain(self) -> torch.Tensor:
        """The plain tensor underneath, to read. Writers take `lend()`."""
        return self._data

    def lend(self) -> torch.Tensor:
        """Return a plain alias that may be written to; the weight counts as changed as long as it lives."""
        return self._state.changes.lend(self._data)

    @property
    def data(self) -> torch.Tensor:
        """The weight without its history, as of any tensor; to set it replaces the values.

        Raises:
            Fp8Error: What is set has another shape or device, or is no float32, bfloat16 or float16.
        """
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch exchanges what is behind a tensor without an operator, and a wrapper has nothing behind it
        plain = value.plain if isinstance(value, ShardedFloat8Weight) else value
        wanted = (self.shape, self.device)
        is_plain = type(plain) in (torch.Tensor, nn.Parameter) and plain.dtype in _DTYPES
        if not is_plain or (plain.shape, plain.device) != wanted:
            raise Fp8Error(
                f"The data of an FP8 weight of shape {tuple(self.shape)}, {self.dtype} on {self.device} can be set to "
                f"a plain tensor like it, of any of {_DTYPES}; got {type(plain).__name__} of shape "
                f"{tuple(plain.shape)}, {plain.dtype} on {plain.device}. Convert the layer after its weight has its "
                "final form."
            )
        if plain.dtype != self.dtype:
            # The dtype of a wrapper is fixed when it is made: exchanged for another one, as of any tensor. Trainers
            # change parameters of bfloat16 to float32 so.
            other = ShardedFloat8Weight(plain.detach(), self._state)
            torch.Tensor.data.__set__(self, other)  # pyrefly: ignore[missing-attribute]
        # So are its strides.
        if plain.stride() != self.stride():
            plain = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device).copy_(plain)
        # The other tensors that alias this weight keep the old data, as with any tensor whose `.data` is set.
        self._data = plain.detach()
        self._state.mark_changed()

    def data_ptr(self) -> int:
        """Return the address of the plain data; a wrapper has none, but tools tell parameters apart by it."""
        return self._data.data_ptr()

    @property
    def _fp8_replaced_by(self) -> str:
        """The mark of `mark_replaced`, kept where FSDP2's plan finds it; there is none as long as it is not set."""
        if self._state.replaced_by is None:
            raise AttributeError("_fp8_replaced_by")
        return self._state.replaced_by

    @_fp8_replaced_by.setter
    def _fp8_replaced_by(self, call: str) -> None:
        self._state.replaced_by = call

    def share_memory_(self) -> "ShardedFloat8Weight":
        """Move the plain data to shared memory, in place; torch would look for a storage of the wrapper."""
        self._data.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the plain data is in shared memory."""
        return self._data.is_shared()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the plain data, which the importer may write to; torch would export an address that is none.

        Raises:
            BufferError: It requires a gradient, as for any tensor: export `weight.detach()`.
        """
        if self.requires_grad:
            raise BufferError("An FP8 weight that requires a gradient cannot be exported: export weight.detach().")
        return self.lend().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the plain data as an array that may be written to; torch has none for subclasses."""
        return self.lend().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._data.tolist()

    def __deepcopy__(self, memo: dict) -> "ShardedFloat8Weight":
        """Copy the data and remember nothing; torch would look for a storage of its own behind `data_ptr`."""
        if id(self) not in memo:
            twin = type(self)(self._data.detach().clone(), copy.deepcopy(self._state, memo))
            own = {name: value for name, value in vars(self).items() if name not in ("_data", "_state")}
            vars(twin).update(copy.deepcopy(own, memo))
            twin.requires_grad_(self.requires_grad)
            twin.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy of a weight (an average, optimizer state) as the plain tensor that it holds.

        Raises:
            Fp8Error: It is a parameter: what is remembered about a weight belongs to this process.
        """
        if not isinstance(self, nn.Parameter):
            return self._data.__reduce_ex__(protocol)
        raise Fp8Error(
            "FP8 weights cannot be pickled with their model. Save model.state_dict(): it holds plain tensors."
        )

    @property
    def strategy(self) -> Strategy:
        """How this weight is scaled."""
        return self._state.strategy

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the high-precision values."""
        return f"ShardedFloat8Weight({self._data!r})"

    def __tensor_flatten__(self) -> tuple[list[str], WeightState]:
        """Expose the plain tensor to the compiler; the state is identity-compared metadata."""
        return ["_data"], self._state

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], state: WeightState, outer_size: Any, outer_stride: Any
    ) -> "ShardedFloat8Weight":
        """Rebuild from `__tensor_flatten__`."""
        return ShardedFloat8Weight(inner["_data"], state)

    @classmethod
    def __metadata_guard__(cls, traced: WeightState, present: WeightState) -> bool:
        """Tell the compiler that compiled code depends on how a weight is cast, not on what is remembered about it."""
        return _kind(traced) == _kind(present)

    def _stable_hash_for_caching(self) -> str:
        """Name what a compiled graph depends on besides the values: the same in every process."""
        return tensor_subclass.stable_hash(self, *map(repr, _kind(self._state)), self.strategy.decode)

    # Everything is decided in `__torch_dispatch__`; the default would wrap the result of every operator in this class.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run `func` on the plain tensors, record writes, and keep weights weights."""
        kwargs = kwargs or {}
        for written in tensor_subclass.written_tensors(func, args, kwargs):
            if isinstance(written, cls):
                # Before the operator runs: should it raise halfway, the weight counts as changed.
                written._state.mark_changed()
        # There is one, or torch would not have called this method.
        source = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda w: w._data, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # An in-place operator returns the very tensor that it was called on, not the plain one under it.
        if func._schema.is_mutable:
            return args[0] if isinstance(result, torch.Tensor) and isinstance(args[0], cls) else result
        # A view shares the state: a write through it makes the scale of the whole shard stale.
        if tensor_subclass.is_view(func):
            if torch.is_inference_mode_enabled():
                # A wrapper that is made here would be an inference tensor, which can share no counter of writes.
                with torch.inference_mode(False):
                    return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, source._state), result)
            return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, source._state), result)
        # FSDP2 uploads an offloaded shard with this operator before it calls `fsdp_pre_all_gather` on the copy: the
        # copy has to lead to the shard whose scale was agreed on. A copy in another dtype is another weight (below).
        if func is aten._to_copy.default and result.dtype == source.dtype:
            return cls(result, source._state.copied())
        if func in _MAKES_WEIGHT and result.is_floating_point():
            return cls(result, source._state.fresh())
        return result

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return what this rank contributes: uint8 buffers, cast once and kept until the weight changes.

        The cast is cached, except on a GPU that the shard is kept off. The first gather of an FSDP root makes its
        `SyncPlan`. A backward gathers the codes of its forward, where they are kept, whatever was written since.
        Whether a gather synchronizes depends on where it happens and never on what this rank did to its weights: the
        others may not have done it, and would not answer.

        Args:
            mesh: The ranks. FSDP2 has forms with more arguments; with this one short ranks can pad their own buffers.
                The number of buffers depends on the world size alone, so ranks always agree.

        Returns:
            uint8 buffers; and as a pair the scales that every rank has and the shape of the gathered weight.
        """
        owner = self._owner()
        state = owner._state
        plan = state.plan()
        if plan is None or plan.is_due(state):
            # The first gather on a rank is the first one on all: each makes its plan here, and the reductions meet.
            (plan or SyncPlan(fsdp.find_root(owner), type(owner))).synchronize_in_gather()
        elif state.changes.are_new(owner._data) and not fsdp.in_backward():
            owner._cast_again()
        if state.wire is not None:
            buffers, scale = state.wire
        else:
            buffers, scale = state.to_wire(self._data, mesh.size())
            # Under CPU offload the codes are on the GPU, which is to hold nothing of the shard between gathers.
            if owner is self:
                state.wire = buffers, scale
        return buffers, (scale, state.geometry.full_shape)

    def _owner(self) -> "ShardedFloat8Weight":
        """Return the weight that FSDP2 shards: this one, unless CPU offload gathers a copy of it on the GPU."""
        state = self._state
        # A weight that a plan knows is no copy.
        if state.plan() is not None or (origin := state.origin()) is None:
            return self
        return next((shard for shard in fsdp.offloaded_shards() if getattr(shard, "_state", None) is origin), self)

    def _cast_again(self) -> None:
        """Drop the kept cast of a weight that was written to since its root's forward began; its scale stays.

        Raises:
            Fp8StaleError: It has outgrown the scale that the ranks agreed on.
        """
        state = self._state
        keys = state.strategy.local_keys(self._data, state.geometry)
        # Keys are the bits of floats that are not negative, so integers compare like the maxima. A smaller one is no
        # error: the scale of before holds it.
        if state.agreed is not None and (keys.to(state.agreed.device) > state.agreed).any():
            raise Fp8StaleError(
                f"{state.name} was changed inside of the forward of its FSDP root and has outgrown the scale that the "
                "ranks agreed on before. Change weights before the forward of the root."
            )
        state.wire = None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Make the gathered weight from the buffers of all ranks, or bring an existing one up to date."""
        kept, full_shape = metadata
        strategy = self._state.strategy
        scale = strategy.scale_from_wire(all_gather_outputs, kept, full_shape)
        target: Any = None if out is None else getattr(out, "_local_tensor", out)
        if target is not None and not strategy.decode:
            # FSDP2 has already refilled the buffer that the codes alias; only the scales are left.
            # By identity: each new agreement brings another tensor, and the gather of a backward finds the scale of its
            # forward in place. None: the scales travelled with this gather.
            if target.filled_from is None or target.filled_from is not kept:
                fsdp.refill(target.scale, scale)
                target.filled_from = kept
            return None
        codes = strategy.codes_from_wire(all_gather_outputs, full_shape)
        if not strategy.decode:
            whole = GatheredFloat8Weight(codes, scale.clone(), strategy.cast.format, param_dtype, strategy.layout.block)
            whole.filled_from = kept
            # Nothing of its own to free: the codes are the gathered buffer, which FSDP2 frees itself.
            return whole, ()
        fmt, block = strategy.cast.fp8_format, strategy.layout.block
        plain = dispatch.dequantize(codes, scale, fmt, param_dtype, block)
        if target is None:
            # memory of its own, which FSDP2 frees on reshard and allocates again before the next gather
            return plain, (plain,)
        fsdp.refill(target, plain)
        return None


def _kind(state: WeightState) -> tuple[type, type, CastRecipe]:
    return type(state.strategy), type(state.strategy.layout), state.strategy.cast


# `torch.load(weights_only=True)` of state that names this class, without the user having to allow it
torch.serialization.add_safe_globals([ShardedFloat8Weight])
