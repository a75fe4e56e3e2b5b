"""Dispatch in codes by what torchtitan and Transformers have, as far as they can be imitated where they are missing.

`tests/ecosystem` runs the real ones.
"""

import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch_layers.linear.row_codes import RowCodes
from fp8_torch_fsdp.expert_parallel.torchtitan import dispatch_in_codes
from fsdp_models import mesh_of
from tests.helpers.ranks import on_ranks

WIDTH, HIDDEN, LOCAL, TOP = 64, 32, 3, 2


def known_as(function, module):
    """Return a forward with the name by which its class is known."""
    return types.FunctionType(function.__code__, {**globals(), "__name__": module})


class LocalTokenDispatcher:
    """torchtitan's, with its signatures: rows sorted by expert, weighted and added to their tokens."""

    def __init__(self, num_experts, top_k):
        self.num_experts, self.top_k, self.ep_mesh = num_experts, top_k, None

    def dispatch(self, x, scores, chosen, counts):
        order = torch.argsort(chosen.view(-1), stable=True)
        metadata = types.SimpleNamespace(
            token_indices_experts_sorted_N=order // self.top_k, topk_scores_experts_sorted_N=scores.view(-1)[order]
        )
        return x[metadata.token_indices_experts_sorted_N], counts, metadata

    def combine(self, routed, metadata, x):
        routed = (routed.float() * metadata.topk_scores_experts_sorted_N.reshape(-1, 1)).to(routed.dtype)
        places = metadata.token_indices_experts_sorted_N.reshape(-1, 1).expand(-1, x.shape[-1])
        return torch.zeros_like(x).scatter_add(0, places, routed)


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    """Its all-to-all would be another; here it must not run."""

    def dispatch(self, x, scores, chosen, counts):
        return super().dispatch(x, scores, chosen, counts)

    def combine(self, routed, metadata, x):
        return super().combine(routed, metadata, x)


class DeepEPTokenDispatcher(LocalTokenDispatcher):
    def dispatch(self, x, scores, chosen, counts):
        return super().dispatch(x, scores, chosen, counts)


class GroupedExperts(nn.Module):
    def __init__(self, count):
        super().__init__()
        for name, shape in {"w1_EFD": (HIDDEN, WIDTH), "w2_EDF": (WIDTH, HIDDEN), "w3_EFD": (HIDDEN, WIDTH)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(count, *shape).bfloat16() / 8))

    def forward(self, x_RD, num_tokens_per_expert_E):
        raise AssertionError("only FP8 experts compute here")


class GroupedLinear(nn.Module):
    """Of torchtitan's main: one stack, of which `linears` belong together."""

    def __init__(self, count, inputs, outputs, linears=1):
        super().__init__()
        shape = (count, outputs, inputs) if linears == 1 else (count, linears, outputs, inputs)
        self.weight = nn.Parameter(torch.randn(shape).bfloat16() / 8)

    def forward(self, input_RI, offsets_E):
        output = F.grouped_mm(input_RI, self.weight.flatten(1, -2).mT, offs=offsets_E)
        return output.reshape(len(input_RI), *self.weight.shape[1:-1])


GroupedExperts.forward = known_as(GroupedExperts.forward, "torchtitan.models.common.moe")
GroupedExperts.forward.__qualname__ = "GroupedExperts.forward"
GroupedLinear.forward = known_as(GroupedLinear.forward, "torchtitan.models.common.linear")
GroupedLinear.forward.__qualname__ = "GroupedLinear.forward"


class RoutedExperts(nn.Module):
    def __init__(self, count, dispatcher):
        super().__init__()
        self.inner_experts, self.token_dispatcher = GroupedExperts(count), dispatcher

    def forward(self, x, scores, chosen):
        counts = torch.bincount(chosen.view(-1), minlength=self.token_dispatcher.num_experts)
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, chosen, counts)
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x)


class RoutedGroups(nn.Module):
    """The same of torchtitan's main, whose projections are modules."""

    def __init__(self, count, dispatcher):
        super().__init__()
        self.w1, self.w3 = (GroupedLinear(count, WIDTH, HIDDEN) for _ in range(2))
        self.w2, self.token_dispatcher = GroupedLinear(count, HIDDEN, WIDTH), dispatcher

    def forward(self, x, scores, chosen):
        counts = torch.bincount(chosen.view(-1), minlength=self.token_dispatcher.num_experts)
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, chosen, counts)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(self.w1(rows.bfloat16(), ends)) * self.w3(rows.bfloat16(), ends)
        return self.token_dispatcher.combine(self.w2(hidden, ends), metadata, x)


class RoutedStacks(nn.Module):
    """The same of torchtitan's main, where gate and up are one module."""

    def __init__(self, count, dispatcher):
        super().__init__()
        self.w13, self.w2 = GroupedLinear(count, WIDTH, HIDDEN, linears=2), GroupedLinear(count, HIDDEN, WIDTH)
        self.token_dispatcher = dispatcher

    def forward(self, x, scores, chosen):
        counts = torch.bincount(chosen.view(-1), minlength=self.token_dispatcher.num_experts)
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, chosen, counts)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = self.w13(rows.bfloat16(), ends).unbind(-2)
        return self.token_dispatcher.combine(self.w2(F.silu(gate) * up, ends), metadata, x)


def mixture(cls, experts, recipe="rowwise", dispatcher=AllToAllTokenDispatcher):
    torch.manual_seed(0)
    return f8.convert_to_float8_training(nn.ModuleList([cls(experts, dispatcher(experts, TOP))]), recipe=recipe)


def drawn(rank, experts):
    torch.manual_seed(rank + 1)
    x, scores = torch.randn(20 * rank, WIDTH).bfloat16(), torch.rand(20 * rank, TOP)
    chosen = torch.rand(20 * rank, experts).topk(TOP).indices
    return x.requires_grad_(), scores.requires_grad_(), chosen


@pytest.mark.parametrize("cls", [RoutedExperts, RoutedGroups, RoutedStacks])
@on_ranks(2)
def test_torchtitans_dispatcher_sends_codes(rank, cls):
    """A twin with all experts on each rank computes the same; what differs is the gradient's first cast."""
    experts, mesh = 2 * LOCAL, mesh_of(2, names=("ep",))
    alone = mixture(cls, experts)[0]
    split = mixture(cls, experts)[0]
    for module in split.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            own = weight.detach().chunk(2)[rank]
            placed = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False))
            module.register_parameter(name, placed)
    split.token_dispatcher.ep_mesh = mesh
    dispatch_in_codes(split)
    assert isinstance(split.token_dispatcher, AllToAllTokenDispatcher)
    x, scores, chosen = drawn(rank, experts)
    received = []
    split.token_dispatcher.experts.register_forward_pre_hook(lambda module, args: received.append(type(args[0])))
    found = []
    for model in (alone, split):
        x.grad = scores.grad = None
        y = model(x, scores, chosen)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16())
        grads = []
        for weight in model.parameters():
            whole = weight.grad.full_tensor() if model is split else weight.grad.clone()
            if model is alone:
                dist.all_reduce(whole)
            grads.append(whole)
        found.append((y.detach(), scores.grad, x.grad, *grads))
    assert RowCodes in received
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert all((a - b).norm() <= 0.03 * a.norm() for a, b in zip(*found, strict=True))


@on_ranks(2)
def test_torchtitans_dispatcher_without_expert_parallelism_stays_local(rank):
    model = dispatch_in_codes(mixture(RoutedExperts, LOCAL))[0]
    given = drawn(rank, LOCAL)
    assert torch.equal(model(*given), mixture(RoutedExperts, LOCAL)[0](*given))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [("tensorwise", "dynamic tensorwise scaling"), ("rowwise_with_gw_hp", "in high precision"), (None, "not in FP8")],
)
def test_torchtitans_experts_that_cannot_take_codes_raise(recipe, why):
    model = nn.ModuleList([RoutedExperts(2, AllToAllTokenDispatcher(2, TOP))])
    model = model if recipe is None else mixture(RoutedExperts, 2, recipe)
    with pytest.raises(Fp8Error, match=f"The module of experts 0 does not support rows as FP8 codes.*: .*{why}"):
        dispatch_in_codes(model)


def test_other_dispatchers_are_left_alone():
    model = mixture(RoutedExperts, 2, dispatcher=DeepEPTokenDispatcher)
    with pytest.raises(Fp8Error, match="found no module with torchtitan's all-to-all dispatcher"):
        dispatch_in_codes(model)
    assert type(model[0].token_dispatcher) is DeepEPTokenDispatcher


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise_delayed"])
def test_projections_that_are_stacked_in_experts_are_one_matmul(recipe):
    """[experts, 2, out, in] computes what the same rows of [experts, 2 * out, in] do, forward and backward."""
    stacked = f8.convert_to_float8_training(nn.ModuleList([GroupedLinear(2, WIDTH, HIDDEN, linears=2)]), recipe=recipe)
    flat = nn.ModuleList([GroupedLinear(2, WIDTH, 2 * HIDDEN)])
    with torch.no_grad():
        flat[0].weight.copy_(stacked[0].weight.flatten(1, 2))
    f8.convert_to_float8_training(flat, recipe=recipe)
    ends = torch.tensor([9, 20], dtype=torch.int32)
    for _ in range(2):
        x, found = torch.randn(20, WIDTH).bfloat16(), []
        for model in (stacked, flat):
            f8.synchronize_scales(model)
            own = x.clone().requires_grad_()
            y = model[0](own, ends)
            y.flatten(1).backward(torch.ones(20, 2 * HIDDEN).bfloat16())
            found.append((y.flatten(1), own.grad, model[0].weight.grad.reshape(2, 2 * HIDDEN, WIDTH)))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert model[0](x, ends).ndim == 2
    assert stacked[0](x, ends).shape == (20, 2, HIDDEN)
    assert {name: one.shape for name, one in stacked.state_dict().items()}["0.weight"] == (2, 2, HIDDEN, WIDTH)
    (weight,) = [one for one in f8.float8_report(stacked).weights if one.name == "0.weight"]
    assert (weight.fp8, weight.wire, weight.why) == (
        True,
        "bfloat16",
        "several projections of each expert in one stack",
    )
    plain = f8.unconvert(stacked)
    assert type(plain[0]) is GroupedLinear


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise_delayed"])
@on_ranks(2)
def test_projections_that_are_stacked_in_experts_are_gathered_in_high_precision(rank, recipe):
    """Under FSDP2 they compute what they do whole."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([GroupedLinear(4, WIDTH, HIDDEN, linears=2)])
        f8.convert_to_float8_training(model, recipe=recipe)
        if sharded:
            fully_shard(model[0], mesh=mesh_of(2))
        x, losses = torch.randn(20, WIDTH).bfloat16(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            f8.synchronize_scales(model)
            loss = model[0](x, torch.tensor([5, 5, 12, 20])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weights_that_are_cut_within_experts_raise(recipe):
    from tests.helpers.ranks import fake_ranks

    with fake_ranks(2):
        model = mixture(RoutedExperts, 2, recipe)[0]
        experts = model.inner_experts
        for name, weight in list(experts.named_parameters()):
            placed = DTensor.from_local(weight.detach(), mesh_of(2), [Shard(1)], run_check=False)
            experts.register_parameter(name, nn.Parameter(placed))
        with pytest.raises(Fp8Error, match=r"w1_EFD of .* is distributed and not gathered"):
            experts(torch.randn(4, WIDTH).bfloat16(), torch.tensor([2, 2]))
