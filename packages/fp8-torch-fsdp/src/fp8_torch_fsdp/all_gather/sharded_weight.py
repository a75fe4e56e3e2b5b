"""`ShardedFloat8Weight`: a high-precision weight, or its shard, that FSDP2 gathers in FP8.

Optimizers, checkpoints and initialization use an ordinary tensor of the original dtype; only FSDP2's all-gather sends
FP8. The gathered weight is a `GatheredWeight`.
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

# Results of these hold new data of a weight (FSDP2 shards with them): still a weight, and another one.
_MAKES_WEIGHT = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.clone.default,
}
# FSDP2 moves shards with these, and under CPU offload uploads them for each gather: the same weight elsewhere.
_MOVES_WEIGHT = {aten._to_copy.default, aten._pin_memory.default}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ShardedFloat8Weight(torch.Tensor):
    """High-precision weight, or this rank's shard, that FSDP2 gathers in FP8.

    Args:
        plain: The plain tensor, float32, bfloat16 or float16 [rows, columns]. Other code may write to it: every forward
            of the FSDP root reads it again.
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
        """The weight without autograd history; assignment replaces the values.

        Raises:
            Fp8Error: The new value has another shape or device, or is not float32, bfloat16 or float16.
        """
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise_if_fsdp1(self)
        # torch swaps the memory of tensors without an operator, and a wrapper has no memory
        plain = value.plain if isinstance(value, ShardedFloat8Weight) else value
        is_plain = type(plain) in (torch.Tensor, nn.Parameter) and plain.dtype in _DTYPES
        if not is_plain or (plain.shape, plain.device) != (self.shape, self.device):
            raise Fp8Error(
                f"The data of an FP8 weight of shape {tuple(self.shape)}, {self.dtype} on {self.device} can be set to "
                f"a plain tensor like it, of any of {_DTYPES}; got {type(plain).__name__} of shape "
                f"{tuple(plain.shape)}, {plain.dtype} on {plain.device}. Convert the layer after its weight has its "
                "final form."
            )
        if plain.dtype != self.dtype:
            # The dtype of a wrapper is fixed when it is made: exchanged for another one, as of any tensor. Trainers
            # change parameters of bfloat16 to float32 so.
            other = ShardedFloat8Weight(plain.detach(), self.fp8_weight)
            torch.Tensor.data.__set__(self, other)  # pyrefly: ignore[missing-attribute]
        # So are its strides.
        if plain.stride() != self.stride():
            plain = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device).copy_(plain)
        # The other tensors that alias this weight keep the old data, as with any tensor whose `.data` is set.
        self.plain = plain.detach()
        self.fp8_weight.writes += 1

    def data_ptr(self) -> int:
        """Return the address of the plain data, which tools use as identity.

        The wrapper has no storage.
        """
        return self.plain.data_ptr()

    @property
    def _fp8_replaced_by(self) -> str | None:
        """The mark of `mark_replaced`, where the root's sync finds it."""
        return self.fp8_weight.replaced_by

    @_fp8_replaced_by.setter
    def _fp8_replaced_by(self, call: str) -> None:
        self.fp8_weight.replaced_by = call

    def share_memory_(self) -> "ShardedFloat8Weight":
        """Move the plain data to shared memory, in place.

        torch would look for a storage of the wrapper.
        """
        self.plain.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the plain data is in shared memory."""
        return self.plain.is_shared()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the plain data by DLPack; the importer may write to it.

        torch would export an invalid address.

        Raises:
            BufferError: It requires a gradient, as for any tensor: export `weight.detach()`.
        """
        if self.requires_grad:
            raise BufferError("An FP8 weight that requires a gradient cannot be exported: export weight.detach().")
        return self.plain.detach().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the plain data as a writable array; torch rejects subclasses."""
        return self.plain.detach().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict) -> "ShardedFloat8Weight":
        """Copy data, gradient and attributes.

        torch would look for a storage at `data_ptr`.
        """
        if id(self) not in memo:
            twin = type(self)(self.plain.detach().clone(), copy.deepcopy(self.fp8_weight, memo))
            attributes = {name: value for name, value in vars(self).items() if name not in ("plain", "fp8_weight")}
            vars(twin).update(copy.deepcopy(attributes, memo))
            twin.requires_grad_(self.requires_grad)
            twin.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy of a weight as its plain tensor.

        Such copies are averages or optimizer state.

        Raises:
            Fp8Error: It is a parameter: the state of a weight belongs to this process.
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
        """Expose the plain tensor to the compiler."""
        return ["plain"], self.fp8_weight

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], fp8_weight: Fp8Weight, outer_size: Any, outer_stride: Any
    ) -> "ShardedFloat8Weight":
        """Rebuild from `__tensor_flatten__`."""
        return ShardedFloat8Weight(inner["plain"], fp8_weight)

    @classmethod
    def __metadata_guard__(cls, traced: Fp8Weight, present: Fp8Weight) -> bool:
        """Register the weight's scaling as the compiler's guard."""
        return traced.grid == present.grid

    def _stable_hash_for_caching(self) -> str:
        """Return the compiled graph's dependencies besides values, equal in every process."""
        return stable_hash(self, repr(self.fp8_weight.grid))

    # Everything is decided in `__torch_dispatch__`; the default would wrap the result of every operator in this class.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` on the plain tensors, count writes, and keep weights weights."""
        kwargs = kwargs or {}
        for written in written_tensors(func, args, kwargs):
            if isinstance(written, cls):
                written.fp8_weight.writes += 1
        # There is one, or torch would not have called this method.
        source = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda weight: weight.plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # An in-place operator returns the very tensor that it was called on, not the plain one under it.
        if is_in_place(func):
            return args[0] if isinstance(result, torch.Tensor) and isinstance(args[0], cls) else result
        if (is_view(func) and func is not aten.view.dtype) or (func in _MOVES_WEIGHT and result.dtype == source.dtype):
            return _wrapped(result, source.fp8_weight)
        if (func in _MAKES_WEIGHT or func in _MOVES_WEIGHT) and result.is_floating_point():
            return _wrapped(result, source.fp8_weight.another())
        return result

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple[Fp8Weight, CodeSnapshot]]:
        """Return this rank's uint8 codes, scales of MX, and metadata.

        The first gather of an FSDP root makes its `ScaleSync`. Whether a gather synchronizes depends on its place and
        never on this rank's writes to weights: ranks without such writes would not take part.

        Args:
            mesh: The ranks. FSDP2 has forms with more arguments; with this one short ranks can pad their own buffers.

        Raises:
            Fp8StaleError: The weight was written to inside of the root's forward and has outgrown its scale.
            Fp8Error: It was sharded in a way that FP8 cannot follow.
        """
        if self.fp8_weight.sync is None:
            ScaleSync.at_first_gather(self.fp8_weight)
        weight = self.fp8_weight
        sent: CodeSnapshot = weight.sync.snapshot_to_gather(weight)
        return tuple(codes.to(weight.device, non_blocking=True) for codes in sent.codes), (weight, sent)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        known: tuple[Fp8Weight, CodeSnapshot],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Build or update the gathered weight from the codes of all ranks.

        Args:
            all_gather_outputs: uint8 buffers, padded at their ends.
            known: Metadata from `fsdp_pre_all_gather`.
            param_dtype: The dtype that the weight stands for.
            out: Result of an earlier gather.

        Returns:
            A `GatheredWeight` of the whole shape, and no other tensor to free; None if `out` is updated.
        """
        weight, sent = known
        grid, shape = weight.grid, weight.region.full_shape
        codes, *scales = all_gather_outputs
        scale_inv = sent.scale_inv
        if grid.is_mx:
            # for one rank FSDP2 passes the first buffer
            scale_inv = unpad(scales[0] if scales else sent.codes[1].to(codes.device), grid.shape(shape), torch.uint8)
        return finish_gather(codes, scale_inv, grid, shape, param_dtype, origin=weight, out=out)


def _wrapped(result: Any, fp8_weight: Fp8Weight) -> Any:
    """Return the tensors of a result as weights."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        return ShardedFloat8Weight(tensor, fp8_weight) if tensor.is_floating_point() else tensor

    if torch.is_inference_mode_enabled():
        # A wrapper that is made here would be an inference tensor, which later training could not save.
        with torch.inference_mode(False):
            return pytree.tree_map_only(torch.Tensor, wrap, result)
    return pytree.tree_map_only(torch.Tensor, wrap, result)


# `torch.load(weights_only=True)` of state that names this class, without the user having to allow it
torch.serialization.add_safe_globals([ShardedFloat8Weight])
