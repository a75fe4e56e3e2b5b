"""What users attached to layers and parameters survives conversion and its undoing; what cannot work says so."""

import copy
import io
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError


class Counting(nn.Linear):
    """A subclass without a forward of its own."""

    def size(self):
        return self.weight.numel()


def tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    return model


def test_ties_survive_conversion():
    model = f8.convert_to_float8_training(tied(), recipe="tensorwise_delayed")
    assert model[0].weight is model[1].weight
    assert model[0].fp8_weight is model[1].fp8_weight
    assert len(list(model.parameters())) == 3


def test_ties_across_calls_are_refused():
    model = tied()
    f8.convert_to_float8_training(model[0])
    with pytest.raises(Fp8Error, match="in one call"):
        f8.convert_to_float8_training(model[1])


def test_a_tie_to_a_layer_of_another_cast_is_refused():
    model = tied()
    f8.convert_to_float8_training(model, module_filter_fn=lambda layer, name: name == "0", recipe="tensorwise")
    with pytest.raises(Fp8Error, match="Convert both with one recipe"):
        f8.convert_to_float8_training(tied(), module_filter_fn=["0 = tensorwise", "1 = blockwise"])


@pytest.mark.parametrize("gathered", [True, False])
def test_ties_survive_unconvert(gathered):
    model = tied()
    config = f8.Float8LinearConfig(all_gather=gathered)
    f8.convert_to_float8_training(model, config=config)
    f8.unconvert(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert model[0].weight is model[1].weight
    assert type(model[0].weight) is nn.Parameter


def test_a_tie_to_an_embedding_survives_unconvert():
    model = nn.ModuleDict({"in": nn.Embedding(16, 16), "out": nn.Linear(16, 16, bias=False)})
    model["out"].weight = model["in"].weight
    f8.convert_to_float8_training(model, heads=True)
    assert f8.unconvert(model)["out"].weight is model["in"].weight


def test_unconvert_returns_the_layer_with_all_that_is_its_own():
    layer = Counting(16, 16)
    layer.note, layer.child = "mine", nn.Tanh()
    layer.register_buffer("steps", torch.zeros(()))
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    before = set(vars(layer)), set(layer.state_dict())
    plain = f8.unconvert(f8.convert_to_float8_training(layer, recipe="tensorwise_delayed"))
    plain(torch.ones(2, 16))
    assert type(plain) is Counting
    assert plain.size() == 256
    assert seen == ["before", "after"]
    assert (set(vars(plain)), set(plain.state_dict())) == before
    assert not plain._state_dict_hooks
    assert isinstance(plain.child, nn.Tanh)


def test_gradients_hooks_and_attributes_of_weights_survive():
    layer = nn.Linear(16, 16)
    layer(torch.ones(2, 16)).sum().backward()
    grad, seen = layer.weight.grad, []
    layer.weight.no_decay = True
    handle = layer.weight.register_hook(lambda g: seen.append("hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    low = f8.convert_to_float8_training(layer)
    assert low.weight.grad is grad
    assert low.weight.no_decay
    low(torch.ones(2, 16)).sum().backward()
    assert seen == ["hook", "after"]
    handle.remove()
    low(torch.ones(2, 16)).sum().backward()
    plain = f8.unconvert(low)
    assert plain.weight.no_decay
    assert plain.weight.grad is grad
    plain(torch.ones(2, 16)).sum().backward()
    assert seen == ["hook", "after", "after", "after"]


# ---------------------------------------------------------------- copies and state dicts

WRAPPINGS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_state_dicts_are_plain_where_the_weight_has_another_name(wrapping, tmp_path):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    WRAPPINGS[wrapping](model[0])
    model(torch.ones(2, 16)).sum().backward()
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for value in loaded.values():
        value.mul_(1.5)
    model.load_state_dict(loaded, assign=True)
    assert any(isinstance(p, f8.ShardedFloat8Weight) for p in model.parameters())


def test_keep_vars_returns_the_parameters():
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


def test_weights_are_read_in_inference_mode():
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    with torch.inference_mode():
        state, alias = model.state_dict(), model[0].weight.detach()
        assert torch.equal(state["0.weight"], alias)
    with torch.no_grad():
        alias.fill_(2.0)
    assert (model[0].weight == 2).all()
    assert torch.allclose(model(torch.ones(1, 16)), model[0].bias + 32.0, rtol=1e-5)


def test_clones_are_saved_as_plain_tensors(tmp_path):
    weight = f8.convert_to_float8_training(nn.Linear(16, 16)).weight
    state = {"average": weight.detach().clone(), "copy": copy.deepcopy(weight.detach())}
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["average"], weight.plain)


def test_shared_memory_and_other_libraries_see_the_values():
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    x, weight = torch.ones(2, 16), model[0].weight
    expected = model(x).detach()
    assert np.array_equal(np.from_dlpack(weight.detach()), weight.plain.numpy())
    assert torch.equal(torch.from_dlpack(weight.detach()), weight.plain)
    assert np.array_equal(weight.detach().numpy(), weight.plain.numpy())
    assert weight.tolist() == weight.plain.tolist()
    with pytest.raises(BufferError, match="detach"):
        np.from_dlpack(weight)
    with pytest.raises(RuntimeError, match="detach"):
        weight.numpy()
    del weight  # torch exchanges parameters that are subclasses only where nobody else refers to them
    assert model.share_memory()[0].weight.is_shared()
    assert torch.equal(model(x), expected)


def test_a_converted_model_can_still_be_moved():
    """Torch exchanges parameters that are subclasses only where nobody holds them weakly."""
    model = f8.convert_to_float8_training(tied()).to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight is model[1].weight


# ---------------------------------------------------------------- errors in words

REFUSED = {
    "a number": (lambda layer: layer(3.0), Fp8Error, "expects a tensor"),
    "a scalar": (lambda layer: layer(torch.tensor(3.0)), Fp8Error, "got ()"),
    "a recipe as config": (
        lambda _: f8.convert_to_float8_training(nn.Linear(2, 2), config="rowwise"),
        Fp8Error,
        "recip",
    ),
    "torchao's option": (lambda _: f8.Float8LinearConfig(enable_fsdp_float8_all_gather=True), Fp8Error, "all_gather="),
    "vmap": (lambda layer: torch.func.vmap(layer)(torch.ones(2, 16)), Fp8UnsupportedError, "torch.func"),
    "jvp": (lambda layer: torch.func.jvp(layer, *[(torch.ones(2, 16),)] * 2), Fp8UnsupportedError, "torch.func"),
    "convolutions": (lambda _: f8.convert_to_float8_training(nn.Conv1d(2, 2, 2)), Fp8Error, "Conv1d (1 parameter,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_says_so(case):
    call, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        call(f8.convert_to_float8_training(nn.Linear(16, 16)))
    assert words in str(caught.value)


def early_optimizer(rank, world_size):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    try:
        early.step()
    except Fp8Error as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_made_between_conversion_and_sharding_is_refused(run_ranks, world_size):
    for message in run_ranks(world_size, early_optimizer):
        assert "fully_shard replaced them" in message


# ---------------------------------------------------------------- weights that are used without their layer


def test_attention_keeps_its_output_projection_in_high_precision():
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    f8.convert_to_float8_training(model)
    assert not isinstance(model.self_attn.out_proj, f8.Float8Linear)
    assert isinstance(model.linear1, f8.Float8Linear)


def test_an_encoder_computes_in_fp8_in_evaluation_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 1).eval()
    model = f8.convert_to_float8_training(copy.deepcopy(plain)).eval()
    x, mask = torch.randn(2, 4, 16), torch.zeros(2, 4, dtype=torch.bool)
    with torch.no_grad():
        wanted, fast = model(x), model(x, src_key_padding_mask=mask)
        exact = plain(x)
    trained = model(x)
    assert torch.allclose(wanted, trained, atol=1e-5), "the same numbers with and without gradients"
    assert torch.allclose(fast, wanted, atol=1e-5)
    assert not torch.allclose(exact, wanted, atol=1e-3), "and those of FP8"
    f8.unconvert(model)
    assert model.layers[0].activation_relu_or_gelu == plain.layers[0].activation_relu_or_gelu
    assert model.use_nested_tensor == plain.use_nested_tensor


def change_dtype(rank, world_size, early):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    wanted = copy.deepcopy(f8.unconvert(copy.deepcopy(model))).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    x = torch.ones(2, 16)
    if not early:
        model(x)
    model.to(torch.bfloat16)
    try:
        return float((model(x.bfloat16()) - wanted(x.bfloat16())).norm() / wanted(x.bfloat16()).norm())
    except Fp8Error as error:
        return str(error)


@pytest.mark.distributed
def test_the_dtype_of_a_sharded_model_changes_before_its_first_forward_or_never(run_ranks):
    """FSDP2 refuses it later for plain parameters; beside FP8 weights it took their bytes for another dtype."""
    assert max(run_ranks(2, change_dtype, True)) < 0.1
    for message in run_ranks(2, change_dtype, False):
        assert message.startswith("0.weight became torch.bfloat16 after it was gathered as torch.float32")


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


def borrow(rank, world_size, how):
    model = f8.convert_to_float8_training(Borrowing(how))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 16)).sum().backward()
    return {str(warning.message) for warning in caught}


@pytest.mark.distributed
@pytest.mark.parametrize("how", BORROWERS)
def test_a_gathered_weight_that_is_multiplied_without_its_layer_is_said(run_ranks, how):
    for messages in run_ranks(2, borrow, how):
        assert any("outside of its layer" in message for message in messages)
