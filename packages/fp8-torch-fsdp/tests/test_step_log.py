"""`Float8Log`: a layer that saturates turns "act" and no other does, on one rank and on two, eager and compiled."""

import json
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common import E4M3, Fp8Error
from fp8_common import _command as command
from fp8_common.rules import Rule
from fp8_common.torch import fake_quantize
from fp8_torch_fsdp.layers.module import Float8Module
from fsdp_models import Block, converted, mesh_of, seeded
from tests.helpers.ranks import on_ranks

RANGE = 8.0
"""What the scale of the planted layer represents."""


def blocks():
    return nn.Sequential(Block(), Block(), Block())


def planted(model):
    """Convert; the input of `1.down` has a constant scale."""
    static = f8.Recipe(
        name="planted",
        input=f8.CastRecipe(scaling="static", static_scale=E4M3.max / RANGE),
        weight=f8.CastRecipe(),
        grad_output=f8.CastRecipe(format="e5m2"),
    )
    f8.convert_to_float8_training(model, module_filter_fn=["*", Rule(pattern="1.down", recipe=static)])
    return model


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def layers_by_level(record, level):
    return {name.rpartition("/")[0] for name, own in record["tensors"].items() if own["level"] == level}


def train(model, log, steps, *, grows_at=None, rank=0):
    """Train; from step `grows_at` on the activations of `1.down` are 50 times as large."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    lines = {}
    for step in range(1, steps + 1):
        if step == grows_at:
            with torch.no_grad():
                model[1].up.weight.mul_(50)
        (model(torch.randn(16, 24, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (line := log.step()) is not None:
            lines[step] = line
    return lines


def test_in_200_steps_the_layer_that_saturates_turns_red_and_no_other(tmp_path, capsys):
    model, numbers = planted(seeded(blocks)), {}
    with f8.Float8Log(model, tmp_path, every=20, scalars=lambda values, step: numbers.update({step: values})) as log:
        lines = train(model, log, 200, grows_at=130)
    written = records(tmp_path / "fp8.jsonl")
    assert [record["step"] for record in written] == list(lines) == list(numbers) == [1, *range(20, 201, 20)]
    for record in written:
        assert layers_by_level(record, "act") == ({"1.down"} if record["step"] > 130 else set())
        assert layers_by_level(record, "look") == set()
        assert record["tensors"].keys() == {
            f"{block}.{layer}/{tensor}"
            for block in range(3)
            for layer in ("up", "down")
            for tensor in ("input", "weight", "grad_output")
        }
    assert lines[120] == "step 120: 6 layers, 6 ok"
    assert lines[140].startswith("step 140: 6 layers, 5 ok, 1 act: 1.down input saturated ")
    assert written[-1]["tensors"]["1.down/input"]["saturated"] == pytest.approx(
        numbers[200]["fp8/1.down/input/saturated"], rel=1e-5
    )
    assert numbers[200]["fp8/layers_act"] == 1
    assert command.main(["watch", str(tmp_path), "--once"]) == 1
    assert capsys.readouterr().out.splitlines()[2].startswith("act    1.down  input ")


def test_a_measured_step_has_the_numbers_of_one_that_is_not(tmp_path):
    """And after it the layers are as before: nothing watches, and code that was compiled for them fits."""
    models = [planted(seeded(blocks)) for _ in range(2)]
    specs = [one.fp8["weight"].spec for one in models[0].modules() if isinstance(one, Float8Module)]
    with f8.Float8Log(models[0], tmp_path, every=2) as log:
        train(models[0], log, 5)
    train(models[1], f8.Float8Log(models[1], tmp_path / "other", every=1000), 5)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    after = [one.fp8["weight"].spec for one in models[0].modules() if isinstance(one, Float8Module)]
    assert all(one is other for one, other in zip(after, specs, strict=True))


def test_micro_batches_of_a_step_are_one_and_a_resumed_run_goes_on(tmp_path):
    model = converted(seeded(lambda: nn.Sequential(nn.Linear(24, 8))))
    with f8.Float8Log(model, tmp_path, every=10) as log:
        for amax in (1.0, 5.0, 2.0):
            model(amax * torch.ones(4, 24)).sum().backward()
        log.step()
    with f8.Float8Log(model, tmp_path, every=10, step=17) as log:
        for step in (18, 19, 20, 21):
            model(torch.ones(4, 24)).sum().backward()
            log.step(step)
    written = records(tmp_path / "fp8.jsonl")
    assert [record["step"] for record in written] == [1, 18, 20]
    assert [record["tensors"]["0/input"]["amax"] for record in written] == [5.0, 1.0, 1.0]


def test_compiled_blocks_are_measured_without_another_compilation(tmp_path):
    torch.compiler.reset()
    model = planted(seeded(blocks))
    for block in model:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    with f8.Float8Log(model, tmp_path, every=3) as log:
        train(model, log, 2)
        graphs = counters["stats"]["unique_graphs"]
        lines = train(model, log, 6)
    assert graphs > 0
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(lines) == 2
    assert all(len(record["tensors"]) == 18 for record in records(tmp_path / "fp8.jsonl"))
    torch.compiler.reset()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed", "blockwise"])
@on_ranks(2)
def test_of_two_ranks_the_first_writes_numbers_of_whole_weights_and_all_batches(rank, recipe, tmp_path):
    model = converted(seeded(blocks), recipe)
    for block in model:
        fully_shard(block, mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    log = f8.Float8Log(model, tmp_path / f"rank-{rank}", every=1)
    x = torch.full((4, 24), 1.0)
    x[0, 0] = 100.0 if rank else 1.0
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():  # an optimizer steps: what was gathered is reported
            parameter.mul_(3)
    line = log.step()
    dist.barrier()
    assert (tmp_path / "rank-1").exists() is False
    assert (line is None) == (rank == 1)
    if rank == 0:
        (record,) = records(tmp_path / "rank-0" / "fp8.jsonl")
        names = {
            f"{b}.{layer}/{t}" for b in range(3) for layer in ("up", "down") for t in ("input", "weight", "grad_output")
        }
        assert record["tensors"].keys() == names
        for name, own in record["tensors"].items():
            assert (own["level"], own["saturated"]) == ("ok", 0.0), name
            if name.endswith("/weight"):
                weight = whole[name.replace("/", ".")]
                assert own["amax"] == pytest.approx(weight.abs().max().item(), rel=1e-5)
        assert record["tensors"]["0.up/input"]["amax"] > 4, (
            "equal values are 0 behind the norm: this is the other rank's"
        )
        flat = whole["0.up.weight"]
        if recipe == "tensorwise":
            zeros = (fake_quantize(flat, E4M3.max / flat.abs().max(), E4M3) == 0).float().mean().item()
            assert record["tensors"]["0.up/weight"]["underflowed"] == pytest.approx(zeros, abs=1e-9)
    log.close()


@on_ranks(2)
def test_saturated_and_underflowed_shares_of_a_sharded_weight_are_those_of_all_rows(rank, tmp_path):
    """The rows of one rank saturate, those of the other vanish; rows are uneven."""
    static = f8.CastRecipe(scaling="static", static_scale=448.0)
    model = nn.Sequential(nn.Linear(16, 5, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[0].weight[0] = 3.0  # of 1 / 5 of the values
        model[0].weight[3:] = 1e-9  # of 2 / 5
        model[0].weight[4, :8] = 0  # zeros are not lost
    f8.convert_to_float8_training(
        model,
        recipe=f8.Recipe(name="s", input=f8.CastRecipe(), weight=static, grad_output=f8.CastRecipe(format="e5m2")),
    )
    fully_shard(model, mesh=mesh_of())
    log = f8.Float8Log(model, tmp_path / str(rank))
    model(torch.ones(2, 16)).sum().backward()
    log.step()
    if rank == 0:
        (record,) = records(tmp_path / "0" / "fp8.jsonl")
        own = record["tensors"]["0/weight"]
        assert own["saturated"] == pytest.approx(16 / 80)
        assert own["underflowed"] == pytest.approx(24 / 80)
        assert (own["amax"], own["scale"]) == (3.0, 448.0)
        assert own["level"] == "act"


def test_what_cannot_be_logged_raises():
    with pytest.raises(Fp8Error, match="no FP8 layers to log"):
        f8.Float8Log(nn.Linear(4, 4), "run")
    with pytest.raises(Fp8Error, match="every must be 1 or more, got 0"):
        f8.Float8Log(converted(seeded(blocks)), "run", every=0)


def test_lines_go_to_logging(tmp_path, caplog):
    model = planted(seeded(blocks))
    with caplog.at_level(logging.INFO), f8.Float8Log(model, tmp_path) as log:
        train(model, log, 1)
    assert "FP8 step 1: 6 layers, 6 ok" in caplog.messages
