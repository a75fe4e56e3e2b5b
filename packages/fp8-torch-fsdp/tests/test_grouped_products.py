"""Grouped products of experts equal a loop over the experts with `Float8Linear`, bit for bit."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
# rows of each expert: none, one, no multiple of 16, more than a block of 128
SIZES = {
    "uneven": [5, 0, 17, 1],
    "blocks": [130, 3, 0, 257],
    "one": [0, 0, 31, 0],
    "empty": [0, 0, 0, 0],
    "even": [16, 16, 16, 16],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Experts(nn.Module):
    """One stack of matrices, as a user would write it."""

    def __init__(self, experts, columns, rows, *, transposed=False, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        # each expert of another size, so that scales of others would show
        size = 10.0 ** torch.arange(experts)[:, None, None]
        values = (torch.randn(experts, rows, columns, generator=generator) * size).to(dtype)
        self.weight = nn.Parameter(values.mT.contiguous() if transposed else values)
        self.transposed = transposed

    def forward(self, x, offsets):
        weight = self.weight if self.transposed else self.weight.mT
        return F.grouped_mm(x, weight, offs=offsets)


def layout(transposed=False):
    return f8.ExpertLayout(forward=grouped, weights=("weight",), transposed=transposed)


def grouped(module, x, offsets):
    return module.grouped_product("weight", x, offsets)


def converted(module, recipe, *, gather=True, **options):
    config = f8.Float8LinearConfig(recipe=recipe, all_gather=gather, **options)
    own = {Experts: layout(module.transposed)}
    return f8.convert_to_float8_training(module, config=config, experts=own)


def rows_of(sizes, columns, dtype, behind=0):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sum(sizes) + behind, columns, generator=generator)
    # rows of unlike sizes
    return (x * torch.logspace(-2, 2, max(1, len(x)))[: len(x), None]).to(dtype)


def looped(weights, x, grad, sizes, recipe):
    """Return output and gradients of one `Float8Linear` for each expert, on its rows alone."""
    outputs, grads_x, grads_w = [], [], []
    for weight, rows, dy in zip(weights, x.split(sizes), grad.split(sizes), strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight.clone())
        layer = f8.convert_to_float8_training(layer, recipe=recipe)
        rows = rows.clone().requires_grad_()
        y = layer(rows)
        y.backward(dy)
        outputs.append(y.detach())
        grads_x.append(rows.grad)
        grads_w.append(torch.zeros_like(weight) if not len(rows) else layer.weight.grad)
    return torch.cat(outputs), torch.cat(grads_x), torch.stack(grads_w)


def same(actual, wanted):
    assert actual.dtype == wanted.dtype
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.matrix(
    recipe=RECIPES, sizes=list(SIZES), dtype=DTYPES, transposed=[False, True], offsets=[torch.int32, torch.int64]
)
def test_the_products_are_those_of_a_loop_over_experts(recipe, sizes, dtype, transposed, offsets):
    sizes = SIZES[sizes]
    module = Experts(len(sizes), 48, 160, transposed=transposed, dtype=dtype)
    weights = [w.t().contiguous() if transposed else w for w in module.weight.detach().clone()]
    x, behind = rows_of(sizes, 48, dtype, behind=3), 3
    x[len(x) - behind :] = torch.inf  # rows of no expert may hold anything
    x.requires_grad_()
    low = converted(module, recipe)
    ends = torch.tensor(sizes).cumsum(0).to(offsets)
    y = low(x, ends)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    grad[len(x) - behind :] = torch.nan
    y.backward(grad)
    count = sum(sizes)
    wanted = looped(weights, x.detach()[:count], grad[:count], sizes, recipe)
    same(y[:count].detach(), wanted[0])
    same(x.grad[:count], wanted[1])
    own = low.weight.grad
    same(own.mT if transposed else own, wanted[2])
    assert not y[count:].any()
    assert not x.grad[count:].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_that_experts_alone(recipe, bad):
    sizes = [4, 4, 4]
    module = Experts(3, 32, 16)
    x = rows_of(sizes, 32, torch.float32)
    x[5, 7] = bad
    x.requires_grad_()
    y = converted(module, recipe)(x, torch.tensor([4, 8, 12], dtype=torch.int32))
    assert not y[5].isfinite().all()
    assert y[:4].isfinite().all()
    assert y[8:].isfinite().all()
    y.sum().backward()
    finite = module.weight.grad.isfinite() if module.weight.grad is not None else None
    assert finite is None or (not finite[1].all() and finite[0].all() and finite[2].all())


def test_a_static_scale_is_that_of_every_expert():
    cast = f8.CastConfig(scaling="static", static_scale=4.0)
    recipe = f8.Recipe(name="static", input=cast, weight=cast, grad_output=cast)
    module = Experts(2, 16, 32)
    weights = list(module.weight.detach().clone())
    x = rows_of([3, 5], 16, torch.float32).requires_grad_()
    y = converted(module, recipe)(x, torch.tensor([3, 8]))
    y.backward(torch.ones_like(y))
    wanted = looped(weights, x.detach(), torch.ones_like(y), [3, 5], recipe)
    same(y.detach(), wanted[0])
    same(x.grad, wanted[1])


def test_a_recipe_that_mixes_granularities():
    recipe = dataclasses.replace(
        f8.Float8LinearConfig(recipe="tensorwise").recipe,
        name="mixed",
        input=f8.CastConfig(granularity="rowwise"),
        grad_output=f8.CastConfig(granularity="rowwise"),
    )
    sizes, module = [7, 0, 20], Experts(3, 32, 48)
    weights = list(module.weight.detach().clone())
    x = rows_of(sizes, 32, torch.float32).requires_grad_()
    low = converted(module, recipe)
    y = low(x, torch.tensor(sizes).cumsum(0))
    y.backward(y.detach())
    wanted = looped(weights, x.detach(), y.detach(), sizes, recipe)
    for actual, expected in zip((y.detach(), x.grad, low.weight.grad), wanted, strict=True):
        same(actual, expected)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([2, 4]), r"one for each expert, got torch.int64 \(2,\)"),
        (torch.tensor([2.0, 4.0, 6.0]), "int32 or int64"),
        ([2, 4, 6], "got list"),
        (torch.tensor([2, 4, 7]), "end at the number of rows, 6, or before; got 2, 4, 7"),
        (torch.tensor([4, 2, 6]), "never fall"),
        (torch.tensor([-1, 2, 6]), "begin at 0"),
        (torch.tensor([[2, 4, 6]]), r"got torch.int64 \(1, 3\)"),
        (torch.tensor([2, 4, 6], device="meta"), "on meta"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, message):
    low = converted(Experts(3, 16, 16), "tensorwise")
    with pytest.raises(Fp8Error, match=message):
        low(torch.randn(6, 16), offsets)


def test_inputs_of_another_shape_are_refused():
    low = converted(Experts(3, 16, 32), "tensorwise")
    ends = torch.tensor([2, 4, 6])
    with pytest.raises(Fp8Error, match=r"expects \[\.\.\., 16\] as input, got \(6, 15\)"):
        low(torch.randn(6, 15), ends)
    with pytest.raises(Fp8Error, match=r"must be a matrix \[rows, features\], got \(2, 3, 16\)"):
        low(torch.randn(2, 3, 16), ends)
    with pytest.raises(Fp8Error, match="'other' is no weight of this module"):
        low.grouped_product("other", torch.randn(6, 16), ends)


def test_a_second_derivative_is_refused():
    low = converted(Experts(2, 16, 16), "tensorwise")
    x = torch.randn(4, 16, requires_grad=True)
    y = low(x, torch.tensor([2, 4]))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_function_transforms_are_refused():
    low = converted(Experts(2, 16, 16), "tensorwise")
    with pytest.raises(Fp8UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda x: low(x, torch.tensor([2, 4])))(torch.randn(3, 4, 16))


def test_autocast_is_that_of_linear_layers():
    low = converted(Experts(2, 16, 32), "tensorwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert low(torch.randn(4, 16), torch.tensor([2, 4])).dtype == torch.bfloat16


def test_shapes_are_known_on_the_meta_device():
    low = converted(Experts(2, 16, 32).to("meta"), "rowwise")
    y = low(torch.empty(4, 16, device="meta", requires_grad=True), torch.empty(2, dtype=torch.int32, device="meta"))
    y.sum().backward()
    assert y.shape == (4, 32)
    assert low.weight.grad.shape == (2, 32, 16)


@pytest.mark.matrix("each", recipe=RECIPES, transposed=[True, False])
def test_compiled_products_are_one_graph_and_the_same_bits(recipe, transposed):
    sizes = [5, 0, 150]
    module = Experts(3, 32, 48, transposed=transposed)
    low = converted(module, recipe)
    results = []
    for function in (low, torch.compile(low, fullgraph=True, backend="aot_eager")):
        low.weight.grad = None
        x = rows_of(sizes, 32, torch.float32, behind=2).requires_grad_()
        y = function(x, torch.tensor(sizes).cumsum(0))
        y.backward(y.detach())
        results.append((y.detach(), x.grad, low.weight.grad))
    for eager, compiled in zip(*results, strict=True):
        same(compiled, eager)
