"""Masters and codes from a checkpoint: every form that one comes in, and everything that may be wrong with it."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
from fp8_common import Fp8Error
from tests.helpers.sharded_models import mlp, shard

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def plain(seed=5, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(150, 140), nn.GELU(), nn.Linear(140, 16)).to(dtype)


def model(dtype=torch.float32, **options) -> nn.Sequential:
    return fti.convert_linear(plain(0, dtype), **options)


def optimizer_of(net):
    return fti.MasterOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)


def is_rounded(net, optimizer) -> bool:
    return all(
        torch.equal(layer.weight.quantized_rows.quantized(optimizer.master_of(layer.weight)), layer.weight.state.codes)
        for layer in net[::2]
    )


@pytest.mark.matrix(recipe=RECIPES, preserve=["cpu", "none"], form=["mapping", "file", "folder"])
def test_masters_and_codes_are_those_of_the_checkpoint_whatever_was_initialized(recipe, preserve, form, tmp_path):
    net, source = model(recipe=recipe, preserve=preserve), plain()
    place = source.state_dict()
    if form == "file":
        place = tmp_path / "model.pt"
        torch.save(source.state_dict(), place)
    elif form == "folder":
        place = tmp_path / "dcp"
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(source.state_dict(), checkpoint_id=place, no_dist=True)
    optimizer = optimizer_of(net)
    report = fti.seed_masters(optimizer, net, checkpoint=place)
    assert report.sources == {"0.weight": "checkpoint", "2.weight": "checkpoint"}
    quantized = fti.convert_linear(plain(), recipe=recipe)
    for layer, exact, expected in zip(net[::2], source[::2], quantized[::2], strict=True):
        assert torch.equal(optimizer.master_of(layer.weight), exact.weight)
        assert torch.equal(layer.weight.state.codes, expected.weight.state.codes)
        assert torch.equal(layer.weight.scale, expected.weight.scale)
    before = optimizer.master_of(net[0].weight).clone()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(optimizer.master_of(net[0].weight), before), "and are not taken for somebody's writes"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["mapping", "folder"])
def test_an_fp8_state_dict_of_this_package_is_understood(recipe, form, tmp_path):
    net, source = model(recipe=recipe), fti.convert_linear(plain(), recipe=recipe)
    place = source.state_dict()
    if form == "folder":
        place = tmp_path
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(source.state_dict(), checkpoint_id=place, no_dist=True)
    optimizer = optimizer_of(net)
    fti.seed_masters(optimizer, net, checkpoint=place)
    for layer, theirs in zip(net[::2], source[::2], strict=True):
        assert torch.equal(optimizer.master_of(layer.weight), theirs.weight.dequantize()), "not the codes, up to 448"
        assert torch.equal(layer.weight.state.codes, theirs.weight.state.codes)


def test_low_precision_parameters_with_masters_get_the_checkpoints_bits_too():
    net, source = model(torch.bfloat16), plain()
    optimizer = optimizer_of(net)
    fti.seed_masters(optimizer, net, checkpoint=source.state_dict())
    assert torch.equal(optimizer.master_of(net[0].bias), source[0].bias)
    assert torch.equal(net[0].bias, source[0].bias.bfloat16())
    assert torch.equal(optimizer.master_of(net[0].weight), source[0].weight), "not rounded to bfloat16"


def test_what_is_kept_on_belongs_to_the_checkpoint_then():
    net, source = model(release="manual"), plain()
    fti.seed_masters(optimizer_of(net), net, checkpoint=source.state_dict())
    assert torch.equal(net[0].weight.get_high_precision_init_val(), source[0].weight)


def test_a_tied_weight_is_found_under_either_name():
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    net[1].weight = net[0].weight
    fti.convert_linear(net)
    values = torch.randn(8, 8)
    optimizer = optimizer_of(net)
    fti.seed_masters(optimizer, net, checkpoint={"1.weight": values})
    assert torch.equal(optimizer.master_of(net[0].weight), values)


def test_the_order_can_be_chosen():
    exact, source = plain(0), plain()
    net = model()
    optimizer = optimizer_of(net)
    order = ("copy", "checkpoint")
    assert set(fti.seed_masters(optimizer, net, True, order, checkpoint=source.state_dict()).sources.values()) == {
        "copy"
    }
    assert torch.equal(optimizer.master_of(net[0].weight), exact[0].weight)
    net = model()
    state = {"0.weight": source[0].weight}
    report = fti.seed_masters(optimizer_of(net), net, source_order=("checkpoint", "copy"), checkpoint=state)
    assert report.sources == {"0.weight": "checkpoint", "2.weight": "copy"}, "a new head keeps its start"


def wrong_checkpoints() -> dict:
    good, codes = plain().state_dict(), fti.convert_linear(plain()).state_dict()
    return {
        r"0.weight has shape \(140, 151\) in the checkpoint": good | {"0.weight": torch.ones(140, 151)},
        r"has shape \(280, 150\) in the checkpoint": good | {"0.weight": torch.ones(280, 150)},
        "0.weight_quant_scale is missing": {k: v for k, v in codes.items() if k != "0.weight_quant_scale"},
        "holds torch.uint8 in the checkpoint, which are no values": good
        | {"0.weight": codes["0.weight"].view(torch.uint8)},
        "2.weight has no source of high-precision values left": {"0.weight": good["0.weight"]},
        "No parameter of the model is in the checkpoint": {f"model.{name}": value for name, value in good.items()},
    }


@pytest.mark.parametrize("told", list(wrong_checkpoints()))
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_dropped(told):
    net = model()
    copies = fti.memory_report(net).copies
    with pytest.raises(Fp8Error, match=told):
        fti.seed_masters(optimizer_of(net), net, checkpoint=wrong_checkpoints()[told])
    assert fti.memory_report(net).copies == copies > 0


def test_a_file_that_is_cut_off_is_named(tmp_path):
    torch.save(plain().state_dict(), tmp_path / "model.pt")
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole[: len(whole) // 2])
    net = model()
    with pytest.raises(Fp8Error, match=r"model.pt' cannot be read .* Is it whole"):
        fti.seed_masters(optimizer_of(net), net, checkpoint=tmp_path / "model.pt")


# ---------------------------------------------------------------- several ranks


def build(kind, world_size, **options):
    torch.manual_seed(0)
    with fti.primary_weights(**options):
        net = mlp()
    return DistributedDataParallel(net) if kind == "ddp" else shard(net, world_size)


def source_of() -> nn.Sequential:
    torch.manual_seed(5)
    return mlp()


def sharded_start(rank, world_size, recipe, form):
    net, place = build("fsdp", world_size, recipe=recipe), source_of().state_dict()
    if form == "sharded":
        place = shard(source_of(), world_size).state_dict()
    if form == "sharded codes":
        place = shard(fti.convert_linear(source_of(), recipe=recipe), world_size).state_dict()
    optimizer = optimizer_of(net)
    fti.seed_masters(optimizer, net, checkpoint=place)
    codes = [layer.weight.to_local().quantized_rows for layer in net]
    rounded = [
        torch.equal(rows.quantized(optimizer.master_of(layer.weight).to_local()), rows.codes())
        for layer, rows in zip(net, codes, strict=True)
    ]
    masters = [optimizer.master_of(layer.weight).full_tensor() for layer in net]
    net(torch.ones(2, 24))
    return masters, rounded


@pytest.mark.distributed
@pytest.mark.matrix(recipe=RECIPES, form=["whole", "sharded", "sharded codes"], world_size=[2, 3])
def test_sharded_models_take_their_rows_of_masters_and_codes(run_ranks, recipe, form, world_size):
    for masters, rounded in run_ranks(world_size, sharded_start, recipe, form):
        assert all(rounded)
        exact = source_of()
        if form == "sharded codes":
            exact = fti.convert_linear(exact, recipe=recipe)
        for master, layer in zip(masters, exact, strict=True):
            assert torch.equal(master, layer.weight.dequantize() if form == "sharded codes" else layer.weight)


def fails_on_one(rank, world_size, kind, fault, folder):
    net = build(kind, world_size)
    path = f"{folder}/{rank}.pt"
    state = source_of().state_dict()
    if rank == 1 and fault == "shape":
        state["3.weight"] = torch.ones(9, 9)
    torch.save(state, path)
    if rank == 1 and fault == "cut":
        os.truncate(path, 500)
    place = f"{folder}/nowhere.pt" if rank == 1 and fault == "missing" else path
    copies = fti.memory_report(net).copies
    try:
        fti.seed_masters(optimizer_of(net), net, checkpoint=place)
    except Fp8Error as error:
        return str(error), fti.memory_report(net).copies == copies
    return "no error", False


@pytest.mark.distributed
@pytest.mark.matrix(kind=["fsdp", "ddp"], fault=["missing", "cut", "shape"], world_size=[2, 3])
def test_a_checkpoint_that_is_bad_on_one_rank_is_an_error_on_all(run_ranks, kind, fault, world_size, tmp_path):
    told = {"missing": "There is no checkpoint", "cut": "cannot be read", "shape": "has shape (9, 9)"}[fault]
    for rank, (message, kept) in enumerate(run_ranks(world_size, fails_on_one, kind, fault, str(tmp_path))):
        assert (told if rank == 1 else "Another rank could not seed the masters of") in message
        assert kept, "nothing is dropped"
