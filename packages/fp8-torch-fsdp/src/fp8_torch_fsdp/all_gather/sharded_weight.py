"""`ShardedFloat8Weight`: a high-precision weight, or its shard, that FSDP2 gathers in FP8.

Optimizers, checkpoints and initialization use an ordinary tensor of the original dtype; only FSDP2's all-gather sends
FP8 codes. The result of the gather is a `GatheredWeight`.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8Error
from fp8_common.torch.compat import (
    OpOverload,
    disabled_torch_function,
    is_in_place,
    is_view,
    pytree,
    stable_hash,
    wrapper_of,
    written_tensors,
)
from fp8_common.torch_layers.sharding.fsdp import unpad
from fp8_common.torch_layers.sharding.gathered import finish_gather
from fp8_torch_fsdp.all_gather.fsdp1 import raise_if_fsdp1
from fp8_torch_fsdp.scales.sync import ScaleSync
from fp8_torch_fsdp.scales.weight import CodeSnapshot, Fp8Weight

aten = torch.ops.aten

# Results of these operators, with which FSDP2 shards, have their own data: they are weights with their own state.
_MAKES_WEIGHT = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.clone.default,
}
# FSDP2 moves shards with these operators, under CPU offload for each gather: results share the state of the weight.
_MOVES_WEIGHT = {aten._to_copy.default, aten._pin_memory.default}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ShardedFloat8Weight(torch.Tensor):
    """High-precision weight, or this rank's shard, that FSDP2 gathers in FP8.

    `convert_to_float8_training` creates it, also for weights that are never sharded; it is exported for `isinstance`
    alone. All operators run on the plain tensor.

    Args:
        plain: Plain tensor, float32, bfloat16 or float16 [rows, columns], or [experts, ...] for stacks. Other code may
            write to it: every forward of the FSDP root reads it again.
        fp8_weight: State of the weight, shared by all tensors that alias it.
    """

    plain: torch.Tensor
    fp8_weight: Fp8Weight

    @staticmethod
    def __new__(cls: type, plain: torch.Tensor, fp8_weight: Fp8Weight) -> "ShardedFloat8Weight":
        """Wrap `plain` without copying it."""
        self = wrapper_of(cls, plain)
        self.plain, self.fp8_weight = plain, fp8_weight
        return self

    @property
    def data(self) -> torch.Tensor:
        """Weight without autograd history; assignment replaces the plain tensor.

        Raises:
            Fp8Error: If the new value has another shape or device, is not float32, bfloat16 or float16, or the weight
                belongs to FSDP1.
        """
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise_if_fsdp1(self)
        # torch would exchange the storages without calling an operator, and a wrapper has no storage.
        plain = value.plain if isinstance(value, ShardedFloat8Weight) else value
        is_plain = type(plain) in (torch.Tensor, nn.Parameter) and plain.dtype in _DTYPES
        if not is_plain or (plain.shape, plain.device) != (self.shape, self.device):
            raise Fp8Error(
                f"The data of an FP8 weight of shape {tuple(self.shape)}, {self.dtype} on {self.device} can only be "
                f"set to a plain tensor of the same shape and device, with any of the dtypes {_DTYPES}; got "
                f"{type(plain).__name__} of shape {tuple(plain.shape)}, {plain.dtype} on {plain.device}. Convert the "
                "layer after its weight has its final shape and device."
            )
        if plain.dtype != self.dtype:
            # The dtype of a wrapper cannot change, so the data of another wrapper is assigned, as for any tensor.
            # Trainers change bfloat16 parameters to float32 in this way.
            other = ShardedFloat8Weight(plain.detach(), self.fp8_weight)
            torch.Tensor.data.__set__(self, other)  # pyrefly: ignore[missing-attribute]
        # The strides of a wrapper cannot change either.
        if plain.stride() != self.stride():
            plain = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device).copy_(plain)
        # Other tensors that alias this weight keep the old data, as for any tensor.
        self.plain = plain.detach()
        self.fp8_weight.writes += 1

    def data_ptr(self) -> int:
        """Return the address of the plain data.

        The wrapper has no storage, and other libraries identify tensors by their address.
        """
        return self.plain.data_ptr()

    @property
    def _fp8_replaced_by(self) -> str | None:
        """Mark of `mark_replaced`, stored in the state that all aliases share."""
        return self.fp8_weight.replaced_by

    @_fp8_replaced_by.setter
    def _fp8_replaced_by(self, call: str) -> None:
        self.fp8_weight.replaced_by = call

    def share_memory_(self) -> "ShardedFloat8Weight":
        """Move the plain data to shared memory, in place."""
        self.plain.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the plain data is in shared memory."""
        return self.plain.is_shared()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the plain data by DLPack; the importer may write to it.

        The wrapper has no storage that torch could export.

        Raises:
            BufferError: If the weight requires a gradient, as for any tensor. Export `weight.detach()`.
        """
        if self.requires_grad:
            raise BufferError("An FP8 weight that requires a gradient cannot be exported. Export weight.detach().")
        return self.plain.detach().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the plain data as a writable array."""
        return self.plain.detach().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict) -> "ShardedFloat8Weight":
        """Copy data, gradient and attributes; the copy has its own state."""
        if id(self) not in memo:
            copied = type(self)(self.plain.detach().clone(), copy.deepcopy(self.fp8_weight, memo))
            attributes = {name: value for name, value in vars(self).items() if name not in ("plain", "fp8_weight")}
            vars(copied).update(copy.deepcopy(attributes, memo))
            copied.requires_grad_(self.requires_grad)
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor, for averages and optimizer state.

        Raises:
            Fp8Error: If it is a parameter: pickling a model would lose the state, which belongs to this process.
        """
        if not isinstance(self, nn.Parameter):
            return self.plain.__reduce_ex__(protocol)
        raise Fp8Error(
            "FP8 weights cannot be pickled with their model. Save model.state_dict(): it holds plain tensors."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the high-precision values."""
        return f"ShardedFloat8Weight({self.plain!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Fp8Weight]:
        """Expose the plain tensor to the compiler, with the state as metadata."""
        return ["plain"], self.fp8_weight

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], fp8_weight: Fp8Weight, outer_size: Any, outer_stride: Any
    ) -> "ShardedFloat8Weight":
        """Rebuild from `__tensor_flatten__`."""
        return ShardedFloat8Weight(inner["plain"], fp8_weight)

    @classmethod
    def __metadata_guard__(cls, traced: Fp8Weight, present: Fp8Weight) -> bool:
        """Guard compiled code on the layout of the scales and the cast."""
        return traced.grid == present.grid

    def _stable_hash_for_caching(self) -> str:
        """Return a key of compiled graphs that is equal in every process."""
        return stable_hash(self, repr(self.fp8_weight.grid))

    # `__torch_dispatch__` decides which results are weights; the default would wrap all results in this class.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` on plain tensors, count writes, wrap results that are weights."""
        kwargs = kwargs or {}
        for written in written_tensors(func, args, kwargs):
            if isinstance(written, cls):
                written.fp8_weight.writes += 1
        # torch calls this method only if an argument is a weight.
        source = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda weight: weight.plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # In-place operators return the wrapper that they were called on, not its plain tensor.
        if is_in_place(func):
            return args[0] if isinstance(result, torch.Tensor) and isinstance(args[0], cls) else result
        if (is_view(func) and func is not aten.view.dtype) or (func in _MOVES_WEIGHT and result.dtype == source.dtype):
            return _wrapped(result, source.fp8_weight)
        if (func in _MAKES_WEIGHT or func in _MOVES_WEIGHT) and result.is_floating_point():
            return _wrapped(result, source.fp8_weight.another())
        return result

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple[Fp8Weight, CodeSnapshot]]:
        """Return this rank's codes for FSDP2's all-gather.

        The first gather of an FSDP root creates its `ScaleSync`. Whether a gather synchronizes scales depends on where
        it happens, never on this rank's writes to weights: otherwise ranks without writes would not take part.

        Args:
            mesh: FSDP mesh. FSDP2 also supports a form of this method with more arguments; with this form, ranks with
                fewer rows pad their own buffers.

        Returns:
            uint8 codes, for MX followed by their scales, and metadata for `fsdp_post_all_gather`.

        Raises:
            Fp8StaleError: If the weight was modified during the root's forward, and its amax exceeds the one of its
                scale.
            Fp8Error: If the sharding is not supported.
        """
        if self.fp8_weight.sync is None:
            ScaleSync.at_first_gather(self.fp8_weight)
        weight = self.fp8_weight
        snapshot: CodeSnapshot = weight.sync.snapshot_to_gather(weight)
        return tuple(codes.to(weight.device, non_blocking=True) for codes in snapshot.codes), (weight, snapshot)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: tuple[Fp8Weight, CodeSnapshot],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Build or update the gathered weight from the codes of all ranks.

        Args:
            all_gather_outputs: uint8 buffers, padded at their ends.
            metadata: Metadata from `fsdp_pre_all_gather`.
            param_dtype: dtype that the gathered weight reports.
            out: Gathered weight to update, or None.

        Returns:
            A `GatheredWeight` of the whole shape, and no other tensors to free; None if `out` was updated.
        """
        weight, snapshot = metadata
        grid, shape = weight.grid, weight.region.full_shape
        codes, *scales = all_gather_outputs
        scale_inv = snapshot.scale_inv
        if grid.is_mx:
            # With a single rank, FSDP2 passes the first buffer only.
            mx_scales = scales[0] if scales else snapshot.codes[1].to(codes.device)
            scale_inv = unpad(mx_scales, grid.shape(shape), torch.uint8)
        return finish_gather(codes, scale_inv, grid, shape, param_dtype, origin=weight, out=out)


def _wrapped(result: Any, fp8_weight: Fp8Weight) -> Any:
    """Wrap the floating-point tensors of a result as weights."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return ShardedFloat8Weight(tensor, fp8_weight) if tensor.is_floating_point() else tensor

    if torch.is_inference_mode_enabled():
        # A wrapper created in inference mode would be an inference tensor, which later training could not save.
        with torch.inference_mode(False):
            return pytree.tree_map_only(torch.Tensor, wrap, result)
    return pytree.tree_map_only(torch.Tensor, wrap, result)


# allows `torch.load(weights_only=True)` of state that refers to this class
torch.serialization.add_safe_globals([ShardedFloat8Weight])
