"""Products of experts equal a loop over the experts with `Float8Linear`, and so do their scales, bit for bit."""

import dataclasses

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import RECIPES as OF_COMMON
from fp8_common import Fp8Error, Fp8UnsupportedError
from fsdp_models import RECIPES, STATIC, Experts, converted, with_delayed

COLUMNS, ROWS = 48, 160
# rows of each expert in each step: none, one, no multiple of 16, more than a block of 128; expert 1 gets its first ones
# late, expert 3 gets none
STEPS = [[5, 0, 17, 0], [130, 3, 0, 0], [0, 0, 0, 0], [16, 16, 16, 0], [1, 0, 31, 0], [6, 7, 2, 0]]
BEHIND = 3
"""Rows of no expert, which may hold anything."""
MIXED = dataclasses.replace(
    OF_COMMON["tensorwise"],
    name="mixed",
    input=f8.CastRecipe(granularity="rowwise"),
    grad_output=f8.CastRecipe(granularity="rowwise"),
)
CASTS = {name: (name, "dynamic") for name in RECIPES} | {
    "delayed_from_one": ("tensorwise_delayed", "one"),
    "static": (STATIC, "dynamic"),
    "granularities_mixed": (MIXED, "dynamic"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stack(experts=2, out=ROWS, columns=COLUMNS, **options):
    return Experts(experts, weight=(out, columns), **options)


def layers_of(module, recipe, **options):
    """Return one `Float8Linear` for each expert."""
    layers = nn.ModuleList()
    for matrix in module.weight.detach().clone():
        matrix = matrix.t().contiguous() if module.transposed else matrix
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
        layer.weight = nn.Parameter(matrix)
        layers.append(converted(layer, recipe, **options))
    return layers


def run_layers(layers, x, grad, sizes):
    """Return output and gradients of the layers, each on its rows alone."""
    outputs, grads = [], []
    for layer, rows, dy in zip(layers, x.split(sizes), grad.split(sizes), strict=True):
        if not len(rows):
            if layer.fp8_weight is not None:
                # the weights of all experts are in use whenever the module is, as under FSDP2, which gathers them all
                layer.fp8_weight.observe(layer.weight.detach().float().abs().amax())
            layer.weight.grad = torch.zeros_like(layer.weight)
            outputs.append(torch.zeros_like(dy))
            grads.append(torch.zeros_like(rows))
            continue
        rows = rows.clone().requires_grad_()
        y = layer(rows)
        y.backward(dy)
        outputs.append(y.detach())
        grads.append(rows.grad)
    return torch.cat(outputs), torch.cat(grads), torch.stack([layer.weight.grad for layer in layers])


@pytest.mark.matrix(recipe=list(CASTS), dtype=DTYPES, transposed=[False, True], offsets=[torch.int32, torch.int64])
def test_every_step_is_that_of_a_loop_over_experts(recipe, dtype, transposed, offsets):
    cast, initial = CASTS[recipe]
    delayed = {"delayed": with_delayed(initial=initial)} if cast == "tensorwise_delayed" else {}
    module = stack(4, transposed=transposed, dtype=dtype)
    layers, low = layers_of(module, cast, **delayed), converted(module, cast, **delayed)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (low, layers)]
    generator = torch.Generator().manual_seed(4)
    for step, sizes in enumerate(STEPS):
        count = sum(sizes)
        # rows of unlike sizes, and other sizes in each step
        x = torch.randn(count + BEHIND, COLUMNS, generator=generator) * 4.0 ** (step % 3)
        x = (x * torch.logspace(-1, 1, len(x))[:, None]).to(dtype)
        grad = (torch.randn(count + BEHIND, ROWS, generator=generator) * 3.0 ** -(step % 4)).to(dtype)
        x[count:], grad[count:] = torch.inf, torch.nan
        for one in (low, layers):
            f8.synchronize_scales(one)
        rows = x.clone().requires_grad_()
        y = low(rows, torch.tensor(sizes).cumsum(0).to(offsets))
        y.backward(grad)
        own = low.weight.grad.mT if transposed else low.weight.grad
        wanted = run_layers(layers, x[:count], grad[:count], sizes)
        for got, want in zip((y[:count].detach(), rows.grad[:count], own), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert not y[count:].any()
        assert not rows.grad[count:].any()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one in (low, layers):
        f8.synchronize_scales(one)
    for operand in ("input", "weight", "grad_output") if delayed else ():
        state = getattr(low, f"fp8_{operand}_weight")
        for name in ("scale", "history", "ready", "observed"):
            wanted = torch.stack([getattr(getattr(layer, f"fp8_{operand}"), name) for layer in layers])
            assert torch.equal(getattr(state, name), wanted), (operand, name)
        assert low.fp8_input_weight.history[0].unique().numel() > 1, "the window holds more than one step"
        assert low.fp8_input_weight.ready.tolist() == [True, True, True, initial == "one"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_that_experts_alone(recipe, bad):
    low, x = converted(stack(3, 16, 32), recipe), torch.randn(12, 32)
    x[5, 7] = bad
    y = low(x, torch.tensor([4, 8, 12]))
    y.sum().backward()
    assert [bool(rows.isfinite().all()) for rows in (y[:4], y[5], y[8:])] == [True, False, True]
    assert [bool(one.isfinite().all()) for one in low.weight.grad] == [True, False, True]


X, ENDS = torch.randn(6, 16), torch.tensor([2, 4, 6])
REFUSED = [
    ((X, ENDS[:2]), Fp8Error, r"one for each expert, got torch.int64 \(2,\)"),
    ((X, ENDS.float()), Fp8Error, "int32 or int64"),
    ((X, [2, 4, 6]), Fp8Error, "got list"),
    ((X, torch.tensor([2, 4, 7])), Fp8Error, "end at the number of rows, 6, or before; got 2, 4, 7"),
    ((X, torch.tensor([4, 2, 6])), Fp8Error, "never fall"),
    ((X, torch.tensor([-1, 2, 6])), Fp8Error, "begin at 0"),
    ((X, ENDS[None]), Fp8Error, r"got torch.int64 \(1, 3\)"),
    ((X, ENDS.to("meta")), Fp8Error, "on meta"),
    ((X[:, :15], ENDS), Fp8Error, r"expects \[\.\.\., 16\] as input, got \(6, 15\)"),
    ((X.view(2, 3, 16), ENDS), Fp8Error, r"must be a matrix \[rows, features\], got \(2, 3, 16\)"),
    (("other", X, ENDS), Fp8Error, "'other' is not a weight of this module"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_does_not_fit_raises(arguments, error, message):
    low = converted(stack(3, 16, 16))
    with pytest.raises(error, match=message):
        (low.expert_matmul if len(arguments) == 3 else low)(*arguments)


def test_function_transforms_and_second_derivatives_raise():
    low, x, ends = converted(stack(2, 16, 16)), torch.randn(4, 16, requires_grad=True), torch.tensor([2, 4])
    with pytest.raises(Fp8UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda x: low(x, ends))(torch.randn(3, 4, 16))
    (grad,) = torch.autograd.grad(low(x, ends).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_autocast_and_the_meta_device_are_those_of_linear_layers():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert converted(stack(2, 32, 16))(torch.randn(4, 16), torch.tensor([2, 4])).dtype == torch.bfloat16
    low = converted(stack(2, 32, 16).to("meta"), "rowwise")
    y = low(torch.empty(4, 16, device="meta", requires_grad=True), torch.empty(2, dtype=torch.int32, device="meta"))
    y.sum().backward()
    assert y.shape == (4, 32)
    assert low.weight.grad.shape == (2, 32, 16)


@pytest.mark.matrix("each", recipe=RECIPES, transposed=[True, False])
def test_compiled_matmuls_are_one_graph_and_the_same_bits(recipe, transposed):
    models = [converted(stack(3, 48, 32, transposed=transposed), recipe) for _ in range(2)]
    functions = [models[0], torch.compile(models[1], fullgraph=True, backend="aot_eager")]
    results = []
    for model, function in zip(models, functions, strict=True):
        generator, own = torch.Generator().manual_seed(2), []
        for _ in range(2 if recipe == "tensorwise_delayed" else 1):
            f8.synchronize_scales(model)
            x = torch.randn(157, 32, generator=generator).requires_grad_()
            model.weight.grad = None
            y = function(x, torch.tensor([5, 5, 155]))
            y.backward(y.detach())
            own += [y.detach(), x.grad, model.weight.grad]
        results.append(own + [buffer.clone() for buffer in model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
