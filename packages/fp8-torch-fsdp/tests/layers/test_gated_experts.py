"""`grouped_swiglu` is its matmuls one by one around the defined activation, bit for bit, with codes between them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch.numerics import silu_mul, silu_mul_backward
from fp8_common.torch_layers.linear import gated
from fsdp_models import DIM, Experts
from fsdp_rows import Row, both_gathers, check
from fsdp_training import adamw
from tests.helpers.ranks import on_ranks

HIDDEN, FEATURES = 80, 48
SIZES = {"uneven": [5, 0, 18, 17], "one": [0, 40, 0, 0], "none": [0, 0, 0, 0], "full": [16, 16, 16, 16]}
BEHIND = 3
"""Rows of no expert, which may hold anything."""


class SiluMul(torch.autograd.Function):
    """The activation and its gradient as they are defined."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return silu_mul(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return silu_mul_backward(grad, *ctx.saved_tensors)[:2]


def one_by_one(activation):
    def forward(experts, x, offsets):
        *ups, down = experts.names
        hidden = [experts.expert_matmul(name, x, offsets) for name in ups]
        gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, -1)
        return experts.expert_matmul(down, activation(gate, up), offsets)

    return forward


def eager(gate, up):
    return F.silu(gate) * up


class Swiglu(Experts):
    """Experts with gate and up in one stack, or in two."""

    def __init__(self, experts=4, *, apart=False, hidden=HIDDEN, features=FEATURES, **options):
        shapes = (
            {"gate": (hidden, features), "up": (hidden, features)} if apart else {"gate_up": (2 * hidden, features)}
        )
        super().__init__(experts, **shapes, down=(features, hidden), **({"dtype": torch.bfloat16} | options))
        self.apart = apart

    def forward(self, x, offsets):
        return self.grouped_swiglu(("gate", "up") if self.apart else "gate_up", "down", x, offsets)

    @property
    def layouts(self):
        return {Swiglu: f8.ExpertLayout(forward=Swiglu.forward, weights=self.names, transposed=self.transposed)}


def low(recipe, forward=Swiglu.forward, **options):
    module = Swiglu(**options)
    layout = f8.ExpertLayout(forward=forward, weights=module.names, transposed=module.transposed)
    return f8.convert_to_float8_training(module, recipe=recipe, experts={Swiglu: layout})


def results(module, sizes, dtype=torch.bfloat16, call=None):
    generator, count = torch.Generator().manual_seed(3), sum(sizes)
    rows = count and count + BEHIND
    x = (4 * torch.randn(rows, FEATURES, generator=generator)).to(dtype)
    grad = torch.randn(rows, FEATURES, generator=generator).to(dtype)
    x[count:], grad[count:] = torch.inf, torch.nan
    x.requires_grad_()
    y = (module if call is None else call)(x, torch.tensor(sizes).cumsum(0))
    y.backward(grad)
    return [y.detach(), x.grad, *(weight.grad for weight in module.parameters())]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.matrix("each", sizes=list(SIZES), apart=[False, True], transposed=[False, True])
def test_results_are_those_of_the_matmuls_one_by_one(sizes, apart, transposed, monkeypatch):
    calls, rows = [], gated.gated_rows
    monkeypatch.setattr(gated, "gated_rows", lambda *given: (calls.append(1), rows(*given))[1])
    options = {"apart": apart, "transposed": transposed}
    found = results(low("rowwise", **options), SIZES[sizes])
    assert calls == [1]
    wanted = results(low("rowwise", one_by_one(SiluMul.apply), **options), SIZES[sizes])
    assert calls == [1]
    assert_equal(found, wanted)
    count = sum(SIZES[sizes])
    assert not found[0][count:].any()
    assert not found[1][count:].any()


@pytest.mark.parametrize("trained", [True, False])
def test_eager_activations_differ_in_the_last_bits_of_gradients_alone(trained):
    modules = low("rowwise"), low("rowwise", one_by_one(eager))
    for module in modules:
        module.requires_grad_(trained)
    found, wanted = (results(module, SIZES["uneven"]) for module in modules)
    assert torch.equal(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert one is None or (one - other).norm() <= 2e-3 * other.norm()
    assert (found[2] is None) == (not trained)


@pytest.mark.parametrize("apart", [False, True])
def test_no_activation_is_saved(apart):
    saved, module = [], low("rowwise", apart=apart)
    x = torch.randn(40, FEATURES).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        module(x, torch.tensor([10, 20, 30, 40]))
    values = sorted((t.dtype, tuple(t.shape)) for t in saved if t.shape[0] == 40)
    wide = [(HIDDEN,), (HIDDEN,)] if apart else [(2 * HIDDEN,)]
    assert values == [(torch.bfloat16, (40, *one)) for one in [(FEATURES,), *wide]]


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("tensorwise", torch.bfloat16), ("rowwise_with_gw_hp", torch.bfloat16), ("rowwise", torch.float32)],
)
def test_other_recipes_and_dtypes_are_the_matmuls_one_by_one(recipe, dtype):
    found, wanted = (
        results(low(recipe, forward, dtype=dtype), SIZES["uneven"], dtype)
        for forward in (Swiglu.forward, one_by_one(eager))
    )
    assert_equal(found, wanted)


def test_weights_that_are_trained_in_part_are_multiplied_one_by_one(monkeypatch):
    monkeypatch.setattr(gated, "gated_rows", None)
    modules = low("rowwise"), low("rowwise", one_by_one(eager))
    for module in modules:
        module.down.requires_grad_(False)
    assert_equal(*(results(module, SIZES["uneven"]) for module in modules))


@pytest.mark.parametrize("apart", [False, True])
def test_compiled_it_is_one_graph_with_the_same_bits(apart):
    modules = [low("rowwise", apart=apart) for _ in range(2)]
    call = torch.compile(modules[1], fullgraph=True, backend="aot_eager")
    assert_equal(results(modules[0], SIZES["uneven"]), results(modules[1], SIZES["uneven"], call=call))


def test_under_autocast_inputs_are_bfloat16():
    module = low("rowwise", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(4, FEATURES), torch.tensor([1, 2, 3, 4])).dtype == torch.bfloat16


def test_what_does_not_fit_raises():
    x, ends = torch.randn(4, FEATURES).bfloat16(), torch.tensor([1, 2, 3, 4])
    module = low("rowwise", apart=True)
    with pytest.raises(Fp8Error, match="'other' is not a weight"):
        module.grouped_swiglu("other", "down", x, ends)
    with pytest.raises(Fp8Error, match="of as many features each as down takes"):
        module.grouped_swiglu("gate", "down", x, ends)
    with pytest.raises(Fp8Error, match="got int"):
        module.grouped_swiglu(("gate", "up"), "down", 3, ends)
    with pytest.raises(Fp8Error, match="never fall"):
        module.grouped_swiglu(("gate", "up"), "down", x, ends.flip(0))


class Mixture(nn.Module):
    """A dense layer and experts that take the same number of tokens each, in bfloat16; the last get none."""

    def __init__(self, recompute=False, **options):
        super().__init__()
        self.dense = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        self.experts, self.recompute = Swiglu(hidden=HIDDEN, features=DIM, **options), recompute

    def forward(self, x):
        x = self.dense(x.bfloat16())
        ends = torch.tensor([3, 3, 7, 7])
        if self.recompute:
            return x + torch.utils.checkpoint.checkpoint(self.experts, x, ends, use_reentrant=False)
        return x + self.experts(x, ends)


@pytest.mark.matrix(
    "each", world_size=[2, 3, 1], apart=[False, True], recompute=[False, True], transposed=[False, True]
)
@on_ranks(lambda given: given["world_size"])
def test_steps_equal_those_with_a_high_precision_gather(rank, world_size, apart, recompute, transposed):
    make = lambda: Mixture(recompute, apart=apart, transposed=transposed)  # noqa: E731
    row = Row(both_gathers(make), casts=None, reductions=None, loop={"optimizer": adamw})
    check(rank, row, "rowwise")
