"""What the private names of torch that these packages use mean, by a program for each that says what to look at."""

import datetime
import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from fp8_common.torch import compat

aten = torch.ops.aten
LOOK = f"torch {torch.__version__} means something else by it: look at {{}} in fp8_common/torch/compat.py."


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---------------------------------------------------------------- compilers


def test_a_constant_is_computed_once():
    answers = iter((2, 3))
    asked = compat.assume_constant_result(lambda: next(answers))
    compiled = torch.compile(lambda x: x * asked(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2, 2], LOOK.format("assume_constant_result")


def test_fake_tensors_are_told_from_others():
    x = torch.nn.Parameter(torch.ones(2))
    with FakeTensorMode() as mode:
        fakes = [torch.ones(2), mode.from_tensor(x)]
    found = [isinstance(each, compat.FakeTensor) for each in (x, x.data, *fakes)]
    assert found == [False, False, True, True], LOOK.format("FakeTensor")


@pytest.mark.gpu
def test_the_current_device_is_that_of_torch():
    torch.cuda.init()
    assert compat.current_device() == torch.cuda.current_device(), LOOK.format("current_device")


def test_the_compiler_is_disabled_as_torch_disables_it():
    seen = []
    hidden = compat.disable_compiler(lambda: seen.append(torch.compiler.is_compiling()))
    torch.compile(lambda x: (hidden(), x + 1)[1], backend="eager")(torch.ones(1))
    assert seen == [False], LOOK.format("disable_compiler")


def test_inductor_compiles_the_function_of_an_operator_and_its_caches_know_the_key():
    """Without the private names of `decompose` the operator itself would run."""
    now = {"factor": 3, "key": "first"}
    operator = torch.library.custom_op(
        "fp8_compat_test::times", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    compat.decompose(operator, lambda x: x * now["factor"], torch.empty_like, lambda: now["key"], "cpu")

    def compiled():
        torch.compiler.reset()
        return torch.compile(lambda x: operator(x) + 1)(torch.ones(4)).tolist()[0]

    with fresh_cache():
        found = [compiled()]
        now["factor"] = 5
        found.append(compiled())  # from the cache
        now["key"] = "second"
        found.append(compiled())
    assert found == [4, 4, 6], LOOK.format("decompose")


def test_operators_stay_opaque_where_torch_lacks_the_names(monkeypatch):
    importlib.import_module("torch._inductor.compile_fx")  # which has imported the name by then
    monkeypatch.delattr("torch._inductor.custom_graph_pass.CustomGraphModulePass")
    schema = "(Tensor x) -> Tensor"
    operator = torch.library.custom_op("fp8_compat_test::twice", lambda x: x * 2, mutates_args=(), schema=schema)
    compat.decompose(operator, lambda x: x * 3, torch.empty_like, str, "cpu")
    assert torch.compile(lambda x: operator(x) + 1)(torch.ones(2)).tolist() == [3, 3], LOOK.format("decompose")


def test_units_for_bfloat16_are_those_that_the_kernel_of_the_system_names():
    names = Path("/proc/cpuinfo")
    flags = names.read_text() if names.exists() else ""
    if "avx2" not in flags:
        pytest.skip("needs Linux on x86-64")
    assert compat.multiplies_bfloat16() == ("avx512_bf16" in flags), LOOK.format("multiplies_bfloat16")


def test_compilers_learn_that_a_tensor_keeps_its_address():
    ours, theirs = torch.zeros(()), torch.zeros(())
    compat.keep_address(ours)
    torch._dynamo.mark_static_address(theirs)
    assert vars(ours) == vars(theirs), LOOK.format("keep_address")


def test_function_transforms_are_seen_and_compilers_are_none():
    seen = []

    def function(x):
        seen.append(compat.in_function_transform())
        return x.sum()

    function(torch.ones(3))
    torch.func.grad(function)(torch.ones(3))
    torch.vmap(function)(torch.ones(2, 3))
    assert seen == [False, True, True], LOOK.format("in_function_transform")
    assert not torch.compile(lambda x: (compat.in_function_transform(), x)[0], backend="eager")(torch.ones(1))


# ---------------------------------------------------------------- tensors and their operators


class Seen(torch.Tensor):
    """A wrapper that notes the operators that reach it, and what they write to."""

    __torch_function__ = compat.disabled_torch_function
    calls: list

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        written = [one is args[0] for one in compat.written_tensors(func, args, kwargs or {})]
        cls.calls.append((str(func), written, compat.is_view(func), compat.is_in_place(func)))
        plain_args = compat.pytree.tree_map_only(cls, lambda one: one.inner, args)
        return func(*plain_args, **compat.pytree.tree_map_only(cls, lambda one: one.inner, kwargs or {}))


def test_a_wrapper_has_the_metadata_of_what_it_wraps_and_sees_operators_below_functions():
    inner = torch.arange(12.0).view(3, 4).t()
    outer = compat.wrapper_of(Seen, inner, dtype=torch.bfloat16)
    outer.inner, Seen.calls = inner, []
    found = type(outer), outer.shape, outer.stride(), outer.dtype, outer.device
    assert found == (Seen, inner.shape, inner.stride(), torch.bfloat16, inner.device), LOOK.format("wrapper_of")
    with torch.no_grad():
        outer.add_(1)
        outer.t()
        outer.clone()
        torch._foreach_mul_([outer], 2.0)
    assert Seen.calls == [
        ("aten.add_.Tensor", [True], False, True),
        ("aten.t.default", [], True, False),
        ("aten.clone.default", [], False, False),
        ("aten._foreach_mul_.Scalar", [False], False, True),
    ], LOOK.format("disabled_torch_function, written_tensors, is_view and is_in_place")
    assert inner.flatten()[0] == 2
    assert inner.flatten()[-1] == 24, LOOK.format("pytree")


def test_collectives_write_to_their_first_argument(world):
    Seen.calls, inner = [], torch.ones(2)
    outer = compat.wrapper_of(Seen, inner)
    outer.inner = inner
    dist.all_reduce(outer)
    ((name, written, _, _),) = Seen.calls
    assert name.startswith("c10d.allreduce_"), LOOK.format("written_tensors")
    assert written == [False]
    assert [*compat.written_tensors(torch.ops.c10d.allreduce_.default, ([inner],), {})] == [inner]
    assert [*compat.written_tensors(torch.ops.c10d.send.default, ([inner],), {})] == []


def test_an_assertion_raises_its_message():
    compat.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="the reason"):
        compat.assert_on_device(torch.tensor(False), "the reason")


def test_copies_land_in_their_targets():
    targets = [torch.zeros(2), torch.zeros(3)]
    compat.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]], LOOK.format("copy_each")


def test_writes_in_a_context_are_not_noticed_by_autograd():
    x, factor = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    y = x * factor
    with compat.keep_versions((factor,)):
        factor.fill_(5.0)
    y.sum().backward()
    assert x.grad.tolist() == [5, 5], LOOK.format("keep_versions")


def test_writes_are_counted():
    x = torch.zeros(2)
    before = compat.version_of(x)
    x.add_(1)
    x[0] = 3
    assert compat.version_of(x) == before + 2, LOOK.format("version_of")
    with torch.inference_mode():
        assert compat.version_of(torch.ones(1)) == 0


# ---------------------------------------------------------------- DTensor, groups, modules


def test_local_parts_are_the_objects_themselves_and_go_back_with_another_dtype(world):
    local = torch.ones(4, 3, dtype=torch.bfloat16)
    tensor = distribute_tensor(local, init_device_mesh("cpu", (1,)), [Shard(0)])
    inside = compat.local_of(tensor)
    assert inside is compat.local_of(tensor), LOOK.format("local_of")
    assert compat.local_of(inside) is inside
    codes = compat.distributed_like(tensor, torch.ones(4, 3, dtype=torch.uint8))
    assert (codes.dtype, codes.placements, codes.shape) == (torch.uint8, (Shard(0),), (4, 3)), LOOK.format(
        "distributed_like"
    )
    assert (codes + codes).dtype == torch.uint8, LOOK.format("distributed_like")
    assert compat.map_local(tensor, torch.Tensor.float).dtype == torch.float32


def test_a_group_tells_its_time_out(world):
    group = dist.new_group([0], timeout=datetime.timedelta(seconds=7))
    assert compat.timeout_of(group) == datetime.timedelta(seconds=7), LOOK.format("timeout_of")


def test_hooks_are_found_where_they_are_registered_and_go_when_they_are_deleted():
    module, calls = nn.Linear(2, 2), []
    module.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
    module.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    module.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    module.register_forward_pre_hook(lambda *_: calls.append("before forward"))
    module.register_forward_hook(lambda *_: calls.append("after forward"))
    found = [*compat.state_dict_hooks(module), *compat.forward_hooks(module)]
    assert [len(hooks) for hooks in found] == [1] * 5, LOOK.format("state_dict_hooks and forward_hooks")
    for hooks in found:
        module.load_state_dict(module.state_dict())
        module(torch.ones(2))
        assert len(set(calls)) == sum(map(len, found)), LOOK.format("state_dict_hooks and forward_hooks")
        hooks.clear()
        calls.clear()


def test_checkpoint_wrappers_put_their_prefix_into_names():
    inside = dict(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))).named_modules())
    assert f"0.{compat.CHECKPOINT_PREFIX.rstrip('.')}" in inside, LOOK.format("CHECKPOINT_PREFIX")


def test_distribute_module_checks_modules_before_it_shards(world):
    module = nn.Linear(2, 2)
    setattr(module, compat.DISTRIBUTED, True)
    with pytest.raises(RuntimeError, match="distribute_module"):
        distribute_module(module, init_device_mesh("cpu", (1,)))
    assert not isinstance(module.weight, torch.distributed.tensor.DTensor), LOOK.format("DISTRIBUTED")


# ---------------------------------------------------------------- scaled matmuls


@pytest.mark.parametrize("rowwise", [False, True])
def test_scales_go_back_from_fp8(rowwise):
    if rowwise and torch.__version__ < "2.13":
        pytest.skip("torch takes row scales on CPU from torch 2.13 on")
    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    a_inv, b_inv = (torch.rand(16, 1), torch.rand(1, 16)) if rowwise else (torch.tensor(0.5), torch.tensor(0.25))
    scaling = ("RowWise" if rowwise else "TensorWise",) * 2
    y = compat.scaled_mm(a, b.t(), a_inv, b_inv, scaling, out_dtype=torch.float32)
    torch.testing.assert_close(y, a.float() @ b.float().t() * (a_inv * b_inv))


def test_the_base_of_a_view_is_the_tensor_that_it_views():
    flat = torch.ones(12)
    assert compat.base_of(flat.view(3, 4)) is flat
    assert compat.base_of(flat.view(3, 4).clone()) is None
    assert compat.base_of(flat) is None
