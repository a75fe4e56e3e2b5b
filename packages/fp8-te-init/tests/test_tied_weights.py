"""Two layers that share one FP8 weight: one master, one storage in state dicts, and a tie that stays."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8_te_init as fti

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied(seed=0, recipe="tensorwise", built="block"):
    torch.manual_seed(seed)
    if built == "converted":
        return fti.convert_linear(Tied(), recipe=recipe)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return Tied()


def plain(seed):
    torch.manual_seed(seed)
    return Tied()


def is_tied(model):
    return model.first.weight is model.second.weight


def address(state, name):
    return state[f"{name}.weight"].untyped_storage().data_ptr()


def shares(state):
    return address(state, "first") == address(state, "second")


def started(model, **options):
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, **options)
    return optimizer, fti.seed_masters(optimizer, model)


def step(model, optimizer):
    model(torch.ones(3, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("built", ["block", "converted"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_files_and_exports_share_one_storage_as_plain_ones_do(recipe, built):
    model = tied(recipe=recipe, built=built)
    optimizer, report = started(model)
    assert len(optimizer.masters()) == 1
    assert report.sources == {"first.weight": "init"}
    state = model.state_dict()
    assert shares(plain(0).state_dict()), "what is compared with"
    assert shares(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert shares(torch.load(buffer, weights_only=True))
    exported = fti.export_fp32_state_dict(model, optimizer)
    assert shares(exported)
    assert torch.equal(exported["second.weight"], optimizer.master_of(model.first.weight))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tie_stays_and_a_resumed_model_goes_on_with_the_same_bits(recipe):
    model = tied(recipe=recipe)
    optimizer, _ = started(model)
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = tied(1, recipe)
    other_optimizer, _ = started(other)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (other, other_optimizer)):
        step(each, its)
    assert is_tied(other)
    assert torch.equal(other.first.weight.state.codes, model.first.weight.state.codes)
    assert torch.equal(other_optimizer.master_of(other.second.weight), optimizer.master_of(model.first.weight))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(plain(5).state_dict()),
        lambda m: m.load_state_dict(tied(5).state_dict()),
        lambda m: m.bfloat16(),
        lambda m: setattr(m.first, "weight", nn.Parameter(torch.randn(16, 16))),
        lambda m: m.second.weight.data.copy_(torch.ones(16, 16)),
        lambda m: m.first.reset_parameters(),
    ],
    ids=["values", "codes", "dtype", "assigned", "data", "reset"],
)
def test_changes_reach_both_layers_and_the_tie_stays(change):
    model = tied()
    before = model.first.weight.dequantize()
    change(model)
    assert is_tied(model)
    assert is_tied(copy.deepcopy(model))
    assert model.first.weight.dtype == torch.bfloat16 or not torch.equal(model.second.weight.dequantize(), before)


def over_ranks(rank, world_size, folder):
    """Return codes after a step, a save, a load into another model and a step more; and whether ties are left."""
    model, reference = (fully_shard(tied(seed), mesh=init_device_mesh("cpu", (world_size,))) for seed in (1, 0))
    unsharded = tied(0)
    optimizers = [started(each)[0] for each in (model, reference, unsharded)]
    step(reference, optimizers[1])
    step(unsharded, optimizers[2])
    dcp.save({"model": reference.state_dict()}, checkpoint_id=folder)
    target = model.state_dict()
    dcp.load({"model": target}, checkpoint_id=folder)
    model.load_state_dict(target)
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in model.state_dict().values()]
    expected = unsharded.state_dict().values()
    same = [torch.equal(a.float(), b.float()) for a, b in zip(whole, expected, strict=True)]
    masters = [len(optimizer.masters()) for optimizer in optimizers]
    return all(same), masters, [is_tied(each) for each in (model, reference)]


@pytest.mark.distributed
def test_ties_of_sharded_weights_stay_over_steps_saves_and_loads(run_ranks, tmp_path):
    for same, masters, ties in run_ranks(2, over_ranks, str(tmp_path)):
        assert same
        assert masters == [1, 1, 1]
        assert all(ties)
