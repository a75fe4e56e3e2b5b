"""Private names of torch, except FSDP2's (`sharding.fsdp`).

They concern compilers, tensor subclasses and their operators, DTensor, hooks of modules, and scaled matmuls under their
older names. Each has a test, which fails if an upgrade of torch moves the name or changes its meaning.
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
"""Name in `torch.nn.functional.ScalingType`."""
SCALING_BY_NAME = TorchVersion(torch.__version__) >= "2.15"
"""True if compilers and CPUs support `torch.nn.functional.scaled_mm` and `scaled_grouped_mm`.

In earlier versions, the private operators that they replace support the same layouts.
"""
ROWS_INTO_ALL_DTYPES = TorchVersion(torch.__version__) >= "2.15"
"""True if matmuls with row scales by CUTLASS can write float32 and float16.

Earlier versions do not support float32; for float16 without a bias they write bits of bfloat16 (pytorch#187569).
"""

CHECKPOINT_PREFIX: str = _CHECKPOINT_PREFIX
"""Prefix that torch's `checkpoint_wrapper` adds to the names of parameters; state dicts do not have it."""
DISTRIBUTED = "_distribute_module_applied"
"""Attribute of modules that `torch.distributed.tensor.distribute_module` reads first and sets to True at its end."""

disable_compiler = _disable_dynamo
"""`torch.compiler.disable` that imports the compiler at the first call of the function.

The public decorator imports the compiler at once, which would add half a second to each import of these packages.
"""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Function that returns the index of the current device without Python code; CUDA must be initialized."""
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` for subclasses that implement only `__torch_dispatch__`."""
assert_on_device: Callable[[torch.Tensor, str], None] = torch._assert_async
"""Function that raises if a bool scalar is False; the host does not wait for it."""
copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""Function that copies each tensor of the second list into the tensor of the first list, in one launch."""


@contextmanager
def keep_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hide writes to tensors in this context from autograd."""
    # Like `torch.autograd._unsafe_preserve_version_counter`, which calls a function for each tensor.
    versions = tuple([tensor._version for tensor in tensors])
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), versions)


def assume_constant_result(function: Function) -> Function:
    """Mark a function whose result compilers may treat as a constant.

    Equals `torch.compiler.assume_constant_result`, which imports Dynamo and would add half a second to each import of
    these packages.

    Args:
        function: Function whose result depends only on its arguments.
    """
    # Dynamo recognizes such functions by this attribute.
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def constant_of_record(function: Function) -> Function:
    """Apply `assume_constant_result` to a function of a frozen dataclass.

    Torch before 2.13 cannot pass a dataclass to such a function. There the function is traced, and numbers of the
    dataclass may be symbols.
    """
    return assume_constant_result(function) if TorchVersion(torch.__version__) >= "2.13" else function


def decompose(
    operator: CustomOpDef, function: Callable[..., Any], fake: Callable[..., Any], key: Callable[[], str], device: str
) -> None:
    """Make Inductor compile a function instead of a call of an operator.

    The operator remains if the function returns NotImplemented, if it writes to arguments, or if this version of torch
    lacks the names below. `torch.library.triton_op` replaces operators before the graph is divided into forward and
    backward, which then repeats launches because equal ones are not recognized. Here the graph has opaque operators
    until both parts are complete.

    Args:
        operator: Operator to replace.
        function: Function for Inductor to trace, with the arguments of the operator. `torch.compiler.is_compiling`
            returns False in it.
        fake: The function without data, for `register_fake`.
        key: Function that returns a key of everything but arguments on which `function` depends. Inductor's caches are
            separate for each key.
        device: Type of the devices for which the operator is replaced.
    """

    @cache
    def register() -> None:
        # Imported here, because the import takes seconds.
        try:
            from torch._inductor.codegen.common import custom_backend_passes
            from torch._inductor.custom_graph_pass import CustomGraphModulePass
            from torch._inductor.fx_passes.post_grad import pass_patterns
            from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern
        except ImportError:
            return

        class Key(CustomGraphModulePass):
            def __call__(self, gm: torch.fx.GraphModule) -> None:
                """Do nothing; only `uuid` is used, because no device has this name."""

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
            new_args, new_kwargs = pytree.tree_unflatten(given, spec)
            with _as_in_eager_mode():
                return function(*new_args, **new_kwargs)

        nodes = [flat[place] for place in places]
        fakes = [node.meta["val"] for node in nodes]
        mode: Any = detect_fake_mode(fakes)
        with mode:
            if trace(*fakes) is NotImplemented:
                return
        match.replace_by_example(trace, nodes, run_functional_passes=False)

    def traced(*args: Any, **kwargs: Any) -> Any:
        # Dynamo calls this function before Inductor looks into its caches.
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
    """Promise compilers that the address of a tensor does not change.

    Compiled code that writes to the tensor can then become a CUDA graph. Equals `torch._dynamo.mark_static_address`
    without importing the compiler.
    """
    x._dynamo_static_input_type = "unguarded"  # pyrefly: ignore[missing-attribute]


def in_function_transform() -> bool:
    """Return whether a `torch.func` transform is active, such as vmap or grad.

    Under a compiler, the result is False.
    """
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


@assume_constant_result
def multiplies_bfloat16() -> bool:
    """Return whether this processor has bfloat16 units.

    Without them, float32 matmuls are many times faster than bfloat16 ones.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # before torch 2.12
        return torch.cpu._is_avx512_bf16_supported()
    return any(capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # "bf16" on Arm


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
    """Return the matmul of FP8 codes, scaled, in `out_dtype`.

    Args:
        a: Codes [M, K], row-major.
        b: Codes [K, N], column-major.
        a_inv: Scales of `a` back from FP8: float32, or E8M0 in cuBLAS's order for 1x32 blocks.
        b_inv: Scales of `b` back from FP8.
        scaling: Granularities of both scales.
        out_dtype: dtype of the result [M, N].
        use_fast_accum: Whether the tensor cores may accumulate with fewer bits.
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
    """Return grouped matmuls of FP8 codes with row scales, in `out_dtype`.

    `offsets`, int32 [groups], are the ends of the groups: of rows of `a`, with a stack of matrices `b`, or of the
    contracted dimension of both matrices.
    """
    options: Any = {"offs": offsets, "use_fast_accum": use_fast_accum}
    if not SCALING_BY_NAME:
        return torch._scaled_grouped_mm(a, b, a_inv, b_inv, out_dtype=out_dtype, **options)
    rows = F.ScalingType.RowWise
    return F.scaled_grouped_mm(  # pyrefly: ignore[missing-attribute]
        a, b, a_inv, rows, b_inv, rows, output_dtype=out_dtype, **options
    )


def wrapper_of(cls: type, inner: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Return a wrapper subclass with a tensor's metadata and no memory.

    Args:
        cls: Subclass with a `__torch_dispatch__`.
        inner: Wrapped tensor; the caller must store it in the result.
        dtype: dtype for autograd and FSDP2; default: that of `inner`.
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
    """Yield the tensor arguments that an operator writes to.

    They are taken from the schema, so that unknown in-place operators are recognized, too. Collectives of
    torch.distributed are not marked in their schemas: all except `send` write to their first argument only.
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
    """Return whether an operator writes to an argument."""
    return func._schema.is_mutable


def is_view(func: OpOverload) -> bool:
    """Return whether an operator's results are views of arguments."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def stable_hash(tensor: torch.Tensor, *described: object) -> str:
    """Return a hash of metadata for compiler caches.

    Args:
        tensor: Tensor whose metadata are included.
        described: Further tensors, whose metadata are included, or plain values.
    """
    text = repr([_metadata(each) if isinstance(each, torch.Tensor) else each for each in (tensor, *described)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, or any other object unchanged."""
    # `to_local` goes through autograd and may return another object than the one that the DTensor holds.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def map_local(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function to a tensor, or to a DTensor's local tensor.

    The result of a DTensor is a DTensor with the same mesh and placements.
    """
    return distributed_like(tensor, change(local_of(tensor)), requires_grad=tensor.requires_grad)


def distributed_like(tensor: torch.Tensor, local: torch.Tensor, *, requires_grad: bool = False) -> torch.Tensor:
    """Return a local tensor distributed like another tensor, without a copy.

    If `tensor` is a DTensor, the result is a DTensor with its mesh, placements and shape; otherwise it is `local`.
    """
    if not isinstance(tensor, DTensor):
        return local
    spec = tensor._spec
    # Operators of DTensor read the dtype from the spec.
    meta = None if spec.tensor_meta is None else spec.tensor_meta._replace(dtype=local.dtype)
    # The constructor is used, because `from_local` is an autograd function that makes a view of its argument.
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=requires_grad)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view, or None for other tensors."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of a tensor, which counts in-place writes.

    Tensors created in inference mode have no version; the result is 0.
    """
    return 0 if tensor.is_inference() else tensor._version


def timeout_of(group: dist.ProcessGroup) -> Any:
    """Return the timeout of a process group, or None if unknown."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the state-dict hooks of a module, by id.

    The three dictionaries have the hooks that run after and before `state_dict`, and before a load. Deleting an entry
    removes the hook.
    """
    return module._state_dict_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the forward hooks of a module, by id.

    The two dictionaries have the hooks that run before and after the forward. Deleting an entry removes the hook.
    """
    return module._forward_pre_hooks, module._forward_hooks


def _metadata(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad)
