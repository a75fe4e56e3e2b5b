"""What users do with models and optimizers in passing: nothing of it may give a wrong answer in silence."""

import copy
import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import Fp8Error

OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)


def model(preserve=True, **options) -> nn.Sequential:
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, **options):
        return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16))


def plain(seed=0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16))


def loss_of(net, rows=8) -> torch.Tensor:
    return (net(torch.ones(rows, 24)) - 1).square().mean()


def seeded(net, cls=torch.optim.SGD, **options):
    optimizer = fti.MasterOptimizer(cls, net.parameters(), **({"lr": 0.0} | options))
    fti.seed_masters(optimizer, net)
    return optimizer


# ---------------------------------------------------------------- what is written to weights beside the optimizer


@pytest.mark.parametrize("kind", ["values", "codes"])
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"])
def test_trap_a_checkpoint_that_is_loaded_after_seeding_is_not_undone_by_the_masters(recipe, kind, caplog):
    net, loaded = model(recipe=recipe), plain(5)
    optimizer = seeded(net)
    source = loaded if kind == "values" else fti.convert_linear(plain(5), recipe=recipe)
    net.load_state_dict(source.state_dict())
    expected = net[0].weight.dequantize()
    loss_of(net).backward()
    optimizer.step()
    assert "2 parameters were written to since their masters were made" in caplog.text
    assert torch.equal(net[0].weight.dequantize(), expected)
    assert torch.equal(optimizer.master_of(net[0].weight), expected)
    assert (expected - loaded[0].weight).norm() / expected.norm() < 0.04


def test_a_checkpoint_that_is_loaded_before_anything_is_released_becomes_the_masters():
    net = model()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.0)
    net.load_state_dict(plain(5).state_dict())
    loss_of(net).backward()
    optimizer.step()
    assert torch.equal(optimizer.master_of(net[0].weight), plain(5)[0].weight), "with all its bits"


def test_low_precision_parameters_that_are_loaded_are_not_undone_either():
    net, loaded = model().bfloat16(), plain(5).bfloat16()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.0)
    net.load_state_dict(loaded.state_dict())
    loss_of(net.float()).backward()
    net.bfloat16()
    optimizer.step()
    assert torch.equal(net[0].bias, loaded[0].bias)


@pytest.mark.parametrize("edit", ["values", "codes", "in place"])
def test_an_edit_that_torch_does_not_count_is_not_undone(edit, caplog):
    net = model()
    optimizer = seeded(net)
    weight = net[0].weight.data
    if edit == "in place":
        weight.mul_(0.5).add_(0.25)
    else:
        weight.copy_(plain(5)[0].weight if edit == "values" else fti.convert_linear(plain(5))[0].weight)
    expected = net[0].weight.dequantize()
    loss_of(net).backward()
    optimizer.step()
    assert "1 parameters were written to" in caplog.text
    assert torch.equal(net[0].weight.dequantize(), expected)


def test_a_model_may_be_initialized_under_its_optimizer():
    net = model(preserve=False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.0)
    for layer in net[::2]:
        layer.reset_parameters()
    expected = net[0].weight.dequantize()
    loss_of(net).backward()
    optimizer.step()
    assert torch.equal(net[0].weight.dequantize(), expected)


def test_masters_keep_their_bits_where_nothing_was_written_or_they_were_set_by_hand(caplog):
    net = model()
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.0)
    by_hand = torch.randn(40, 24)
    with torch.no_grad():
        optimizer.master_of(net[0].weight).copy_(by_hand)
        net[0].weight.copy_(net[0].weight.dequantize())
        net[2].weight.copy_(net[2].weight.dequantize())  # an exponential average that is put in and taken out again
    for _ in range(2):
        loss_of(net).backward()
        optimizer.step()
    assert torch.equal(optimizer.master_of(net[0].weight), by_hand)
    assert torch.equal(optimizer.master_of(net[2].weight), plain()[2].weight)
    assert not caplog.text


def test_a_frozen_weight_that_is_thawed_under_its_optimizer_is_refused():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    net[0].weight.requires_grad_(True)
    loss_of(net).backward()
    with pytest.raises(Fp8Error, match=r"shape \(40, 24\) was frozen when this MasterOptimizer took it"):
        optimizer.step()


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_masters_as_it_trains_float32_parameters(name):
    cls, options = getattr(torch.optim, name), {"lr": 1e-2}
    if name == "LBFGS":
        options = {"lr": 1.0, "line_search_fn": "strong_wolfe"}
    net = model(preserve=True)
    weights = [layer.weight for layer in net[::2]]
    optimizer = fti.MasterOptimizer(cls, weights, **options)
    fti.seed_masters(optimizer, net)
    twins = [nn.Parameter(layer.weight.detach().clone()) for layer in plain()[::2]]
    reference = cls(twins, **options)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for layer, twin in zip(net[::2], twins, strict=True):
        twin.grad = layer.weight.grad.clone()
    if name == "LBFGS":
        assert loss_of(net) < 0.5 * first, "several evaluations in a step, each with the weights of its masters"
        return
    reference.step()
    for weight, twin in zip(weights, twins, strict=True):
        assert torch.equal(optimizer.master_of(weight), twin)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loss_of(net).backward()
    optimizer.step()


def test_several_optimizers_of_one_model_are_seeded_together():
    net, exact = model(), plain()
    first = fti.MasterOptimizer(torch.optim.Muon, [net[0].weight], lr=0.1)
    second = fti.MasterOptimizer(torch.optim.AdamW, net[2].parameters(), lr=0.1)
    for optimizer, weight in ((first, net[0].weight), (second, net[2].weight)):
        with torch.no_grad():
            optimizer.master_of(weight).zero_()
    assert fti.seed_masters([first, second], net).sources == {"0.weight": "init", "2.weight": "init"}
    assert torch.equal(first.master_of(net[0].weight), exact[0].weight)
    assert torch.equal(second.master_of(net[2].weight), exact[2].weight)
    assert fti.memory_report(net).copies == 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_model_is_copied_together_with_its_optimizer(how):
    net = model()
    optimizer = seeded(net, torch.optim.AdamW, lr=0.1)
    loss_of(net).backward()
    optimizer.step()
    if how == "deepcopy":
        other, copied = copy.deepcopy((net, optimizer))
    else:
        file = io.BytesIO()
        torch.save((net, optimizer), file)
        file.seek(0)
        other, copied = torch.load(file, weights_only=False)
    for each, its in ((net, optimizer), (other, copied)):
        its.zero_grad()
        loss_of(each).backward()
        its.step()
    assert copied.master_of(net[0].weight) is None
    assert torch.equal(copied.master_of(other[0].weight), optimizer.master_of(net[0].weight))
    assert torch.equal(loss_of(other), loss_of(net))


def test_a_model_that_changes_its_dtype_goes_on_with_its_optimizer():
    net = model()
    optimizer = seeded(net, lr=0.5)
    before = optimizer.master_of(net[0].weight).clone()
    net.bfloat16()
    net(torch.ones(2, 24, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not torch.equal(optimizer.master_of(net[0].weight), before)
    assert net[0].weight.state.quantized(optimizer.master_of(net[0].weight)).equal(net[0].weight.state.codes)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_a_head_that_is_tied_to_an_embedding_is_seeded_whichever_comes_first(first):
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        head = nn.Linear(24, 50, bias=False)
    start = head.weight.get_high_precision_init_val().clone()
    embedding = nn.Embedding(50, 24)
    embedding.weight = head.weight
    net = nn.ModuleList([embedding, head] if first == "embedding" else [head, embedding])
    optimizer = fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    fti.rescale_(net)
    assert set(fti.seed_masters(optimizer, net).sources.values()) == {"init"}
    assert torch.equal(optimizer.master_of(head.weight), start)
    assert fti.memory_report(net).copies == 0


def test_a_model_with_a_tied_embedding_is_saved_as_plain_tensors():
    def tied():
        with fti.fp8_model_init(preserve_high_precision_init_val=True):
            embedding, head = nn.Embedding(50, 24), nn.Linear(24, 50, bias=False)
            embedding.weight = head.weight
            embedding.weight = head.weight
        return nn.Sequential(embedding, head)

    net, other, file = tied(), tied(), io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {value.dtype for value in state.values()} == {torch.uint8, torch.float32}
    other.load_state_dict(state)
    assert torch.equal(other[0].weight.dequantize(), net[1].weight.dequantize())


def test_a_layer_from_elsewhere_keeps_the_values_that_it_is_given():
    layer, values, loaded = nn.Linear(24, 40), nn.Parameter(torch.randn(40, 24)), plain(5)[0]
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        layer.weight = values
        assert layer.weight is values
        layer.load_state_dict(loaded.state_dict(), assign=True)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, loaded.weight)


def test_compiled_models_compute_with_the_codes_of_now():
    net = model()
    optimizer = seeded(net, lr=0.5)
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(3):
        loss = loss_of(compiled)
        assert torch.equal(loss, loss_of(net))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_without_rows_and_without_data_have_the_right_shape(recipe, device):
    with torch.device(device), fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = nn.Linear(24, 40)
    assert layer(torch.ones(3, 24, device=device)).shape == (3, 40)
    assert layer(torch.ones(24, device=device)).shape == (40,)
    empty = layer(torch.ones(0, 24, device=device))
    empty.sum().backward()
    assert empty.shape == (0, 40)
    assert layer.weight.grad.shape == (40, 24)
    if device == "cpu":
        assert layer.weight.grad.count_nonzero() == 0


def test_gradients_accumulate_and_recomputed_ones_are_the_same():
    from torch.utils.checkpoint import checkpoint

    net, x = model(), torch.ones(4, 24, requires_grad=True)
    net(x).sum().backward()
    once = net[0].weight.grad.clone()
    net(x).sum().backward()
    assert torch.equal(net[0].weight.grad, 2 * once)
    net.zero_grad()
    checkpoint(net, x, use_reentrant=False).sum().backward()
    assert torch.equal(net[0].weight.grad, once)


# ---------------------------------------------------------------- checkpoints


def test_an_assigned_checkpoint_brings_the_history_of_delayed_scaling():
    net = model(recipe="tensorwise_delayed")
    optimizer = seeded(net, lr=0.3)
    for _ in range(3):
        loss_of(net).backward()
        optimizer.step()
    other = model(recipe="tensorwise_delayed", preserve=False)
    other.load_state_dict(net.state_dict(), assign=True)
    assert torch.equal(other[0].weight.state.history, net[0].weight.state.history)


def test_an_optimizer_that_was_made_before_the_conversion_does_not_step():
    net = plain()
    early = torch.optim.SGD(net.parameters(), lr=1.0)
    fti.convert_linear(net)
    loss_of(net).backward()
    with pytest.raises(Fp8Error, match=r"holds 2 of 4 .*convert_linear replaced them"):
        early.step()
