"""What users attached to layers and parameters survives conversion and its undoing; what cannot work says so."""

import copy
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import converted, mesh_of, seeded
from tests.helpers.ranks import on_ranks
from tests.helpers.tensors import reloaded

X = torch.ones(2, 16)


def one():
    return nn.Sequential(nn.Linear(16, 16))


def tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    return model


# ---------------------------------------------------------------- ties


def test_ties_survive_conversion_moves_and_unconvert():
    model = converted(tied(), "tensorwise_delayed")
    assert model[0].fp8_weight is model[1].fp8_weight
    # torch exchanges parameters that are subclasses only where nobody holds them weakly
    assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16
    for gathered in (True, False):
        model = converted(tied(), gather=gathered)
        assert model[0].weight is model[1].weight
        assert len(list(model.parameters())) == 3
        f8.unconvert(model)
        assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
        assert model[0].weight is model[1].weight
        assert type(model[0].weight) is nn.Parameter


def test_ties_across_calls_or_casts_raise():
    model = tied()
    converted(model[0])
    with pytest.raises(Fp8Error, match="in one call"):
        converted(model[1])
    converted(tied(), rules=lambda layer, name: name == "0")
    with pytest.raises(Fp8Error, match="Convert both with one recipe"):
        f8.convert_to_float8_training(tied(), module_filter_fn=["0 = tensorwise", "1 = blockwise"])


class FlatExperts(nn.Module):
    """Experts whose weight is no stack, as their layout claims."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))


def test_a_conversion_that_raises_leaves_the_model_unchanged():
    layouts = {FlatExperts: f8.ExpertLayout(forward=lambda module, x, offsets: x)}
    for model, rules in (
        (tied(), ["0 = tensorwise", "1 = blockwise"]),
        (nn.ModuleDict({"a": nn.Linear(16, 16), "b": FlatExperts()}), None),
    ):
        weights, classes = list(model.parameters()), [type(module) for module in model.modules()]
        with pytest.raises(Fp8Error):
            f8.convert_to_float8_training(model, module_filter_fn=rules, experts=layouts)
        assert [type(module) for module in model.modules()] == classes
        assert all(new is old for new, old in zip(model.parameters(), weights, strict=True))
        assert not any(hasattr(module, "fp8") for module in model.modules())


def test_the_same_layer_in_two_places_is_converted_once():
    shared = nn.Linear(16, 16)
    model = converted(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], f8.Float8Linear)


# ---------------------------------------------------------------- attributes, hooks, subclasses


class Counting(nn.Linear):
    """A subclass without a forward of its own, but with another layer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.extra = nn.Linear(4, 4)

    def size(self):
        return self.weight.numel()


class OwnForward(Counting):
    def forward(self, x):
        return super().forward(x) + 1


def test_subclasses_keep_their_children_and_their_own_forward():
    model = nn.ModuleDict({"plain": Counting(8, 8), "own": OwnForward(8, 8)})
    names = [name for name, _ in model.named_parameters()]
    converted(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert [isinstance(one, f8.Float8Linear) for one in model.values()] == [True, False]
    assert isinstance(model["plain"], Counting), "what the subclass adds is still there"
    assert type(model["own"]) is OwnForward
    assert copy.deepcopy(model["plain"]).extra is not model["plain"].extra
    assert all(isinstance(one.extra, f8.Float8Linear) for one in model.values())


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers_raise_unless_filtered(parametrize):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": parametrize(nn.Linear(8, 8))})
    with pytest.raises(Fp8Error, match=r"b .*parametrized.*module_filter_fn"):
        converted(model)
    converted(model, rules=lambda layer, name: name == "a")
    assert isinstance(model["a"], f8.Float8Linear)
    assert not isinstance(model["b"], f8.Float8Linear)


def test_unconvert_returns_the_layer_with_all_that_is_its_own():
    layer = Counting(16, 16).eval()
    layer.note, layer.child = "mine", nn.Tanh()
    layer.register_buffer("steps", torch.zeros(()))
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    before = set(vars(layer)), set(layer.state_dict())
    low = converted(layer, "tensorwise_delayed")
    low(X)
    plain = f8.unconvert(low)
    plain(X)
    assert seen == ["before", "after"] * 2
    assert type(plain) is Counting
    assert (plain.size(), plain.training, plain.note) == (256, False, "mine")
    assert (set(vars(plain)), set(plain.state_dict())) == before
    assert not plain._state_dict_hooks
    assert isinstance(plain.child, nn.Tanh)


def test_a_converted_weight_has_the_state_of_the_last_conversion():
    layer = converted(nn.Linear(16, 16), "tensorwise")
    plain = f8.unconvert(layer)
    assert not hasattr(plain.weight, "fp8_weight")
    again = converted(plain, "rowwise")
    assert again.weight.fp8_weight is again.fp8["weight"].weight


def test_gradients_hooks_and_attributes_of_weights_survive():
    layer = nn.Linear(16, 16)
    layer(X).sum().backward()
    grad, seen = layer.weight.grad, []
    layer.weight.no_decay = True
    handle = layer.weight.register_hook(lambda g: seen.append("hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    low = converted(layer)
    assert low.weight.grad is grad
    assert low.weight.no_decay
    low(X).sum().backward()
    assert seen == ["hook", "after"]
    handle.remove()
    low(X).sum().backward()
    plain = f8.unconvert(low)
    assert plain.weight.no_decay
    assert plain.weight.grad is grad
    plain(X).sum().backward()
    assert seen == ["hook", "after", "after", "after"]


@pytest.mark.parametrize("replace", [f8.convert_to_float8_training, f8.unconvert])
def test_an_optimizer_that_was_made_too_early_does_not_step(replace):
    model = one()
    if replace is f8.unconvert:
        converted(model)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    replace(model)
    model(X).sum().backward()
    with pytest.raises(Fp8Error, match=rf"holds 1 of 2 .*{replace.__name__} replaced them.*Create the optimizer after"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@on_ranks(2)
def test_an_optimizer_made_between_conversion_and_sharding_raises(rank):
    model = converted(one())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    with pytest.raises(Fp8Error, match="fully_shard replaced them"):
        early.step()


def closure(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1


def as_accelerate_does_it(layer):
    layer._old_forward = layer.forward
    layer.forward = functools.partial(lambda module, x: module._old_forward(x) + 1, layer)


@pytest.mark.parametrize("wrap", [closure, as_accelerate_does_it])
def test_a_forward_around_a_layer_is_one_around_the_fp8_layer(wrap):
    plain, x = nn.Linear(32, 48), torch.randn(4, 32)
    wanted, exact = converted(copy.deepcopy(plain))(x) + 1, plain(x) + 1
    model = nn.Sequential(plain)
    wrap(plain)
    converted(model)
    assert torch.equal(model(x), wanted)
    assert not torch.equal(model(x), exact)
    assert model[0] is plain, "it is the same object"
    assert torch.equal(f8.unconvert(model)(x), exact)


def test_a_forward_that_does_not_call_the_layer_leaves_it_wide():
    layer = nn.Linear(32, 48)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    model = converted(nn.Sequential(layer, nn.Linear(48, 32)))
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], f8.Float8Linear)


# ---------------------------------------------------------------- copies and state dicts

WRAPPINGS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_state_dicts_are_plain_where_the_weight_has_another_name(wrapping, tmp_path):
    model = converted(one())
    WRAPPINGS[wrapping](model[0])
    model(X).sum().backward()
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict({name: value * 1.5 for name, value in reloaded(state).items()}, assign=True)
    assert any(isinstance(p, f8.ShardedFloat8Weight) for p in model.parameters())


def test_clones_are_saved_as_plain_tensors_and_models_are_not_pickled(tmp_path):
    low = converted(nn.Linear(16, 16))
    clones = {"average": low.weight.detach().clone(), "clone": low.weight.clone().detach()}
    loaded = reloaded(clones | {"copy": copy.deepcopy(low.weight.detach())})
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    assert all(torch.equal(value, low.weight.plain) for value in loaded.values())
    assert low.state_dict(keep_vars=True)["weight"] is low.weight
    with pytest.raises(Fp8Error, match=r"cannot be pickled with their model.*state_dict\(\)"):
        torch.save(low, tmp_path / "model.pt")


def test_weights_are_read_in_inference_mode():
    model = converted(one())
    with torch.inference_mode():
        state, alias = model.state_dict(), model[0].weight.detach()
        assert torch.equal(state["0.weight"], alias)
    with torch.no_grad():
        alias.fill_(2.0)
    assert (model[0].weight == 2).all()
    assert torch.allclose(model(X), model[0].bias + 32.0, rtol=1e-5)


def test_shared_memory_and_other_libraries_see_the_values():
    model = converted(one())
    weight, expected = model[0].weight, model(X).detach()
    assert np.array_equal(np.from_dlpack(weight.detach()), weight.plain.numpy())
    assert weight.tolist() == weight.plain.tolist()
    with pytest.raises(BufferError, match="detach"):
        np.from_dlpack(weight)
    with pytest.raises(RuntimeError, match="detach"):
        weight.numpy()
    del weight  # torch exchanges parameters that are subclasses only where nobody else refers to them
    assert model.share_memory()[0].weight.is_shared()
    assert torch.equal(model(X), expected)


def test_a_layer_moves_to_another_device_and_back():
    """torch swaps each parameter with its copy, which it refuses while anything refers to one of them weakly."""
    moved, stayed = (converted(seeded(one)) for _ in range(2))
    for _ in range(2):
        moved._apply(lambda t: torch.ops.aten._to_copy.default(t))  # what .to("cuda") does to each tensor
        assert isinstance(moved[0].weight, f8.ShardedFloat8Weight)
        assert torch.equal(moved(X), stayed(X))


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_the_dtype_of_a_sharded_model_changes_before_its_first_forward_or_never(rank, early):
    """FSDP2 refuses it later for plain parameters; beside FP8 weights it took their bytes for another dtype."""
    model, wanted = converted(seeded(one)), seeded(one).bfloat16()
    fully_shard(model, mesh=mesh_of())
    if not early:
        model(X)
    model.to(torch.bfloat16)
    if early:
        torch.testing.assert_close(model(X.bfloat16()), wanted(X.bfloat16()), rtol=0.1, atol=0.1)
        return
    with pytest.raises(Fp8Error, match=r"0\.weight became torch\.bfloat16 after it was gathered as torch\.float32"):
        model(X.bfloat16())


# ---------------------------------------------------------------- weights that are used without their layer


def test_an_encoder_computes_in_fp8_in_evaluation_too():
    layer = seeded(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    plain = nn.TransformerEncoder(layer, 1).eval()
    model = converted(copy.deepcopy(plain)).eval()
    assert not isinstance(model.layers[0].self_attn.out_proj, f8.Float8Linear), "attention uses its weight alone"
    assert isinstance(model.layers[0].linear1, f8.Float8Linear)
    x, mask = torch.randn(2, 4, 16), torch.zeros(2, 4, dtype=torch.bool)
    with torch.no_grad():
        wanted, fast, exact = model(x), model(x, src_key_padding_mask=mask), plain(x)
    assert torch.allclose(wanted, model(x), atol=1e-5), "the same numbers with and without gradients"
    assert torch.allclose(fast, wanted, atol=1e-5)
    assert not torch.allclose(exact, wanted, atol=1e-3), "and those of FP8"
    f8.unconvert(model)
    assert model.layers[0].activation_relu_or_gelu == plain.layers[0].activation_relu_or_gelu
    assert model.use_nested_tensor == plain.use_nested_tensor


BORROWERS = {
    "linear": lambda x, w: nn.functional.linear(x, w),
    "transposed": lambda x, w: x @ w.T,
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "vector": lambda x, w: w @ x[0],
}


class Borrowing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(16, 16, bias=False), how

    def forward(self, x):
        return BORROWERS[self.how](x, self.layer.weight)


@on_ranks(2)
def test_a_gathered_weight_that_is_multiplied_without_its_layer_is_said(rank):
    for how in BORROWERS:
        model = fully_shard(converted(Borrowing(how)), mesh=mesh_of())
        with pytest.warns(UserWarning, match="outside of its layer"):
            model(X).sum().backward()
