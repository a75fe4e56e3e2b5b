"""What TransformerEngine, Megatron, accelerate and others do with layers, parameters and gradients."""

import copy
import threading

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common.torch.linear.function import fp8_linear


def layer(dtype=torch.float32, preserve=True, **options) -> nn.Linear:
    torch.manual_seed(0)
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve, **options):
        return nn.Linear(24, 40, dtype=dtype)


def optimizer_of(net, **options):
    return fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.cpu()])
def test_attributes_of_parameters_survive_moves(move):
    moved = layer()
    moved.weight.main_grad, moved.weight.tensor_model_parallel = torch.ones(40, 24), True
    move(moved)
    assert moved.weight.tensor_model_parallel
    assert moved.weight.main_grad.shape == (40, 24)
    assert moved.weight.get_high_precision_init_val() is not None


@pytest.mark.parametrize("features", [(5, 0), (0, 5)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_layers_without_features_train_as_plain_ones_do(features, recipe):
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        empty = nn.Linear(*features)
    optimizer = optimizer_of(empty)
    x = torch.ones(3, features[0], requires_grad=True)
    empty(x).sum().backward()
    optimizer.step()
    assert empty(x).shape == (3, features[1])
    assert x.grad.shape == x.shape


def test_a_layer_that_another_thread_builds_is_a_plain_one():
    built = []
    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(8, 8)))
        thread.start()
        thread.join()
    assert type(built[0]) is nn.Linear


@pytest.mark.parametrize("preserve", [True, False])
def test_a_plain_optimizer_of_fp8_weights_is_told_of_once(caplog, preserve):
    with fti.fp8_model_init(preserve_high_precision_init_val=preserve):
        net = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
    (said,) = caplog.messages
    assert said.startswith("AdamW made a step with 2 FP8 weights that have no float32 masters")
    assert said.endswith("Use MasterOptimizer(AdamW, model.parameters(), ...).")


def test_parameters_are_rebuilt_as_accelerate_does_it():
    """`init_empty_weights`: type(p)(p.to(device), **p.__dict__, requires_grad=...)."""
    weight = layer().weight
    attributes = weight.__dict__ | {"requires_grad": weight.requires_grad}
    rebuilt = type(weight)(weight.to("meta"), **attributes)
    assert isinstance(rebuilt, fti.PrimaryFloat8Weight)
    assert isinstance(rebuilt, nn.Parameter)
    assert rebuilt.is_meta
    assert rebuilt.requires_grad


def test_values_can_be_dequantized_to_another_dtype():
    weight = layer(torch.bfloat16).weight
    assert torch.equal(weight.dequantize(dtype=torch.float32), weight.state.values())
    assert weight.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["main_grad", "decoupled_grad"])
def test_gradients_are_found_where_megatron_and_transformer_engine_put_them(name):
    ours, theirs = layer(), layer()
    optimizers = [optimizer_of(ours), optimizer_of(theirs)]
    gradient = torch.randn(40, 24)
    ours.weight.grad = gradient.clone()
    setattr(theirs.weight, name, gradient.clone())
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(optimizers[0].master_of(ours.weight), optimizers[1].master_of(theirs.weight))
    assert not torch.equal(optimizers[1].master_of(theirs.weight), layer().weight.get_high_precision_init_val())


def test_masters_can_be_rounded_through_the_models_dtype_as_transformer_engine_does():
    net = layer(torch.bfloat16)
    optimizer = optimizer_of(net, round_through_dtype=True)
    for _ in range(5):
        net.weight.grad = torch.randn(40, 24, dtype=torch.bfloat16)
        optimizer.step()
        master, rows = optimizer.master_of(net.weight), net.weight.state
        low = nn.Linear(24, 40, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            low.weight.copy_(master)
        cast = fti.convert_linear(low).weight  # what a bfloat16 model casts at its forward
        assert torch.equal(rows.own_codes, cast.state.codes)
        assert torch.equal(net.weight.scale, cast.scale)


@pytest.mark.parametrize("read", [lambda w: w.dtype, lambda w: w.device], ids=["dtype", "device"])
def test_compiled_code_reads_the_dtype_and_the_device_of_a_weight(read):
    """As models of Transformers do; a guard of the compiler compared what every step changes, and failed at once."""
    net = layer()
    optimizer = optimizer_of(net)
    traced = []

    def backend(graph, _):
        traced.append(graph)
        return graph

    compiled = torch.compile(lambda x: x.to(read(net.weight)) + 1, fullgraph=True, backend=backend)
    for _ in range(3):
        assert compiled(torch.ones(2)).dtype == torch.float32
        net(torch.ones(2, 24)).sum().backward()
        optimizer.step()
    assert len(traced) == 1, "steps are no reason to compile again"


def test_state_dicts_are_taken_and_loaded_in_inference_mode():
    net, other = layer(), layer()
    with torch.no_grad():
        other.weight.mul_(3.0)
    with torch.inference_mode():
        state = other.state_dict()
        net.load_state_dict(state)
    assert torch.equal(net.weight.dequantize(), other.weight.dequantize())
    net.load_state_dict(state)


class CastAtEachForward(nn.Linear):
    """TransformerEngine's method without FP8 primary weights: bfloat16 weights that each forward casts."""

    def forward(self, x):
        return fp8_linear(x, self.weight, self.spec)


def test_rounded_through_bfloat16_a_hundred_losses_equal_those_of_bfloat16_weights_that_are_cast():
    """Without `round_through_dtype` some of them differ: the codes are then those of the float32 masters."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=torch.bfloat16) for a, b in ((24, 40), (40, 16))))
    nets = {through: fti.convert_linear(copy.deepcopy(twin)) for through in (True, False)}
    for linear in twin:
        linear.__class__, linear.spec = CastAtEachForward, nets[True][0].spec
    models = {"twin": (twin, fti.MasterOptimizer(torch.optim.AdamW, twin.parameters(), lr=1e-3))}
    for through, net in nets.items():
        optimizer = fti.MasterOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-3, round_through_dtype=through)
        fti.seed_masters(optimizer, net)
        models[through] = net, optimizer
    losses = {name: [] for name in models}
    for _ in range(100):
        x = torch.randn(32, 24)
        for name, (net, optimizer) in models.items():
            loss = (net(x.bfloat16()).float() - x[:, :16].sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses[True] == losses["twin"]
    assert losses["twin"][-1] < 0.9 * losses["twin"][0]
    assert losses[False] != losses["twin"]
