"""Private names of torch, except FSDP2's (`sharding.fsdp`).

Compilers, tensor subclasses and their operators, DTensor, hooks of modules; scaled matmuls under their older names. A
test of each shows where to look if an upgrade moved the name or changed its meaning.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor
from torch.library import CustomOpDef
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

__all__ = [
    "CHECKPOINT_PREFIX",
    "DISTRIBUTED",
    "ROWS_INTO_ALL_DTYPES",
    "FakeTensor",
    "OpOverload",
    "Scaling",
    "assert_on_device",
    "assume_constant_result",
    "base_of",
    "constant_of_record",
    "copy_each",
    "decompose",
    "disable_compiler",
    "disabled_torch_function",
    "distributed_like",
    "forward_hooks",
    "in_function_transform",
    "is_in_place",
    "is_view",
    "keep_address",
    "keep_versions",
    "local_of",
    "map_local",
    "multiplies_bfloat16",
    "pytree",
    "scaled_grouped_mm",
    "scaled_mm",
    "stable_hash",
    "state_dict_hooks",
    "timeout_of",
    "version_of",
    "wrapper_of",
    "written_tensors",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Scaling = Literal["TensorWise", "RowWise", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128"]
"""A name of `torch.nn.functional.ScalingType`."""
SCALING_BY_NAME = TorchVersion(torch.__version__) >= "2.15"
"""Whether compilers and CPUs know `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`.

Before, the operators that they supersede take the same layouts.
"""
ROWS_INTO_ALL_DTYPES = TorchVersion(torch.__version__) >= "2.15"
"""Whether matmuls with scales of rows by CUTLASS write float32 and float16.

Earlier versions do not support float32, and without a bias write the bits of bfloat16 for a requested float16:
pytorch#187569.
"""

CHECKPOINT_PREFIX: str = _CHECKPOINT_PREFIX
"""Inserted by torch's `checkpoint_wrapper` into the names of parameters, and removed from names in state dicts."""
DISTRIBUTED = "_distribute_module_applied"
"""Name that `torch.distributed.tensor.distribute_module` reads from a module before it shards its parameters."""

disable_compiler = _disable_dynamo
"""`torch.compiler.disable`, importing the compiler with the first call.

As a decorator that adds half a second to every import of these packages.
"""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the current device, once CUDA is initialized, without entering a Python function."""
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of subclasses that see operators in `__torch_dispatch__` alone."""
assert_on_device: Callable[[torch.Tensor, str], None] = torch._assert_async
"""Raises, without a wait, if a bool scalar is False."""
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""Copies each of the second tensors into one of the first, in one launch."""


@contextmanager
def keep_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hide writes to tensors from autograd while the `with` block runs."""
    # As `torch.autograd._unsafe_preserve_version_counter`, which calls a function for each tensor.
    versions = tuple([tensor._version for tensor in tensors])
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), versions)


def assume_constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result` without importing the compiler.

    That decorator imports Dynamo, which would add half a second to every import of these packages.

    Args:
        function: Its result depends on nothing but its arguments.
    """
    # The attribute by which Dynamo knows such functions.
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def constant_of_record(function: Function) -> Function:
    """`constant_result` for a function of a frozen dataclass, if supported.

    A compiler traces it otherwise.

    torch 2.11 gives no dataclass to such a function. Traced, numbers of the dataclass may be symbols.
    """
    return assume_constant_result(function) if TorchVersion(torch.__version__) >= "2.13" else function


def decompose(
    operator: CustomOpDef, function: Callable[..., Any], fake: Callable[..., Any], key: Callable[[], str], device: str
) -> None:
    """Make Inductor compile `function` instead of the operator.

    Unless it returns NotImplemented.

    `torch.library.triton_op` does so before the graph is cut into forward and backward: equal launches are then no
    longer found, and made again. Here the graph consists of opaque operators until both halves are done. In the
    function `torch.compiler.is_compiling` is False. Operators that write to arguments stay opaque, and all stay opaque
    if a torch lacks the names below.

    Args:
        operator: The operator.
        function: The function for Inductor to compile.
        fake: The function without data, for `register_fake`.
        key: Returns the dependences of `function` besides its arguments; code in Inductor's caches belongs to one key.
        device: The type of the devices on which it does so.
    """

    @cache
    def register() -> None:
        # only now, because it takes seconds to import
        try:
            from torch._inductor.codegen.common import custom_backend_passes
            from torch._inductor.custom_graph_pass import CustomGraphModulePass
            from torch._inductor.fx_passes.post_grad import pass_patterns
            from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern
        except ImportError:
            return

        class Key(CustomGraphModulePass):
            def __call__(self, gm: torch.fx.GraphModule) -> None:
                """Never runs: no device has its name; only `uuid` matters."""

            def uuid(self) -> str:
                return key()

        custom_backend_passes[operator._opoverload.namespace] = Key()
        pattern = CallFunctionVarArgs(operator._opoverload)
        register_graph_pattern(pattern, pass_dict=pass_patterns[2])(replace)  # pyrefly: ignore[bad-argument-type]

    def replace(match: Any, *args: Any, **kwargs: Any) -> None:
        flat, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, each in enumerate(flat) if isinstance(each, torch.fx.Node)]

        def trace(*tensors: torch.Tensor) -> Any:
            given = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(given, spec)
            with _as_in_eager_mode():
                return function(*own_args, **own_kwargs)

        nodes = [flat[place] for place in places]
        fakes = [node.meta["val"] for node in nodes]
        mode: Any = detect_fake_mode(fakes)
        with mode:
            if trace(*fakes) is NotImplemented:
                return
        match.replace_by_example(trace, nodes, run_functional_passes=False)

    def traced(*args: Any, **kwargs: Any) -> Any:
        # Dynamo calls this before it looks in a cache.
        if any(isinstance(each, torch.Tensor) and each.device.type == device for each in args):
            register()
        return fake(*args, **kwargs)

    operator.register_fake(traced)


@contextmanager
def _as_in_eager_mode() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def keep_address(x: torch.Tensor) -> None:
    """Mark `x` as static in memory for compilers.

    Programs that write to it may then become CUDA graphs.

    Equals `torch._dynamo.mark_static_address`, without importing the compiler.
    """
    x._dynamo_static_input_type = "unguarded"  # pyrefly: ignore[missing-attribute]


def in_function_transform() -> bool:
    """Return whether `torch.func` transforms the current code.

    vmap, grad, jvp and others; False under a compiler.
    """
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


@assume_constant_result
def multiplies_bfloat16() -> bool:
    """Return whether this processor has bfloat16 units.

    Without them float32 matmuls are many times faster.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # before torch 2.12
        return torch.cpu._is_avx512_bf16_supported()
    return any(capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # the last one of Arm


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    scaling: tuple[Scaling, Scaling],
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return codes a [M, K] @ b [K, N], scaled, in `out_dtype`.

    b is column-major; scales go back from FP8.

    Scales are float32; scales of 1x32 blocks are E8M0, in cuBLAS's order.
    """
    if not SCALING_BY_NAME:
        return torch._scaled_mm(a, b, a_inv, b_inv, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    of_a, of_b = (getattr(F.ScalingType, name) for name in scaling)
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if scaling[0] == "BlockWise1x32" else F.SwizzleType.NO_SWIZZLE
    options: Any = {"output_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    return F.scaled_mm(a, b, a_inv, of_a, b_inv, of_b, swizzle_a=swizzle, swizzle_b=swizzle, **options)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inv: torch.Tensor,
    b_inv: torch.Tensor,
    *,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Return matmuls of row groups, or over them, with row scales.

    `offsets` are int32 [groups].
    """
    options: Any = {"offs": offsets, "use_fast_accum": use_fast_accum}
    if not SCALING_BY_NAME:
        return torch._scaled_grouped_mm(a, b, a_inv, b_inv, out_dtype=out_dtype, **options)
    rows = F.ScalingType.RowWise
    return F.scaled_grouped_mm(  # pyrefly: ignore[missing-attribute]
        a, b, a_inv, rows, b_inv, rows, output_dtype=out_dtype, **options
    )


def wrapper_of(cls: type, inner: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of subclass `cls` with `inner`'s metadata.

    It has no memory.

    Args:
        cls: A subclass with a `__torch_dispatch__`.
        inner: The wrapped tensor; `cls` must keep it.
        dtype: The dtype that autograd and FSDP2 see; by default `inner`'s.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        inner.size(),
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=dtype or inner.dtype,
        device=inner.device,
        requires_grad=inner.requires_grad,
    )


def written_tensors(func: OpOverload, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """Yield every tensor among the arguments that `func` writes to.

    By the operator's schema, so that unknown in-place operators are recognized as well. Collectives of
    torch.distributed have no such marks: all except `send` write to their first argument and to nothing else.
    """
    if func.namespace == "c10d":
        outputs = () if func is torch.ops.c10d.send.default else args[:1]
        yield from (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        return
    if not is_in_place(func):
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_in_place(func: OpOverload) -> bool:
    """Return whether the operator writes to an argument."""
    return func._schema.is_mutable


def is_view(func: OpOverload) -> bool:
    """Return whether the operator's results alias an argument without writing to it."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def stable_hash(tensor: torch.Tensor, *described: object) -> str:
    """Return a hash of metadata and `described` for compiler caches.

    `described` are tensors or plain values.
    """
    text = repr([_metadata(each) if isinstance(each, torch.Tensor) else each for each in (tensor, *described)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def local_of(tensor: Any) -> Any:
    """Return a DTensor's local tensor, or any other object unchanged.

    The local tensor is the object that it holds.
    """
    # Not `to_local`, which goes through autograd and may return another object.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def map_local(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `change` to a tensor or a DTensor's local part.

    The DTensor keeps its placements.
    """
    return distributed_like(tensor, change(local_of(tensor)), requires_grad=tensor.requires_grad)


def distributed_like(tensor: torch.Tensor, local: torch.Tensor, *, requires_grad: bool = False) -> torch.Tensor:
    """Return `local`, distributed like `tensor`, without a copy.

    A DTensor with its mesh, placements and shape, if it is one.
    """
    if not isinstance(tensor, DTensor):
        return local
    spec = tensor._spec
    # operators of DTensor read the dtype from the spec
    meta = None if spec.tensor_meta is None else spec.tensor_meta._replace(dtype=local.dtype)
    # the constructor and not `from_local`, an autograd function that takes a view of its argument
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view, None for other tensors."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version, the number of writes.

    Tensors made in inference mode do not count.
    """
    return 0 if tensor.is_inference() else tensor._version


def timeout_of(group: dist.ProcessGroup) -> Any:
    """Return a process group's timeout, None if unknown."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's state-dict hooks by id.

    After its state dict was made, before that, and before a load.

    Deleting from one of these removes the hook.
    """
    return module._state_dict_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's forward hooks by id.

    Before and after its forward; deleting from one removes the hook.
    """
    return module._forward_pre_hooks, module._forward_hooks


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad)
