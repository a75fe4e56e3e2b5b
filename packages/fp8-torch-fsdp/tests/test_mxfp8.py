"""MXFP8 under FSDP2: three matmuls in blocks of 32, with one gathered plane of codes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch import dequantize_mx, quantize_mx
from tests.helpers.collectives import CollectiveCounter

# ---------------------------------------------------------------- FSDP2


class Block(nn.Module):
    def __init__(self, width=64, dtype=torch.bfloat16):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        # on three ranks 96 rows are even and 64 are not
        self.up, self.down = nn.Linear(width, 96, dtype=dtype), nn.Linear(96, width, bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def build(gathers, mesh, *, compiled=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    config = f8.Float8LinearConfig(recipe="mxfp8", all_gather=gathers)
    f8.convert_to_float8_training(model, config=config)
    for block in model:
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, rank, steps=3):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.full_tensor() for name, p in model.named_parameters()}


def both(rank, ranks, situation):
    options = {"compiled": {"compiled": True}, "kept": {"reshard_after_forward": False}}.get(situation, {})
    shape, names = ((2, ranks // 2), ("replicate", "shard")) if situation == "replicas" else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return [train(build(gathers, mesh, **options), rank) for gathers in (True, False)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "situation"), [(1, ""), (2, ""), (3, ""), (2, "compiled"), (2, "kept"), (4, "replicas")]
)
def test_the_gather_changes_no_number(run_ranks, ranks, situation):
    for (losses, weights), (expected, others) in run_ranks(ranks, both, situation):
        assert losses == expected
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def beside(rank, ranks):
    """Count bytes; then let everything else be compressed, too, in the same groups."""
    model = build(True, init_device_mesh("cpu", (ranks,)))
    with CollectiveCounter() as counter:
        model(torch.ones(32, 64).bfloat16()).float().square().mean().backward()
    report = {w.name: (w.wire, w.wire_bytes, w.why) for w in f8.float8_report(model).weights}
    handle = f8.compress_communication(model)
    train(model, rank, 1)
    casts = f8.float8_report(model).casts
    return counter.nbytes("all_gather"), counter.count("all_reduce"), report, handle.report(), casts


@pytest.mark.distributed
def test_one_plane_travels_with_its_scales_and_nothing_is_agreed_on(run_ranks):
    for sent, reductions, report, compressed, casts in run_ranks(2, beside):
        size = 2 * 96 * 64 * (1 + 1 / 32)
        # codes and scales of half a block, its vectors in bfloat16, for two blocks and twice a step
        assert sent == 4 * (size + 2 * (64 + 64 + 96)) / 2
        assert reductions == 0
        assert report["0.up.weight"] == ("float8_e4m3fn", 96 * (64 + 2), "dynamic mx")
        assert compressed == [], "the layers gather codes by themselves; their gradients are compressed"
        assert casts == 2 * 4, "once for each weight and step"


def mixed(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(Block(dtype=torch.float32))
    codes = quantize_mx(model[0].up.weight.detach(), "e4m3")
    f8.convert_to_float8_training(model, recipe="mxfp8")
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    gathered = model[0].up.weight
    values = dequantize_mx(*codes, "e4m3", torch.bfloat16)
    same = torch.equal(gathered.codes.view(torch.uint8), codes.data.view(torch.uint8))
    return (
        gathered.dtype,
        same,
        torch.equal(gathered.dequantize(), values),
        torch.equal(gathered.float(), values.float()),
    )


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_arrives_are_codes_of_the_weight_before_mixed_precision(run_ranks, ranks):
    assert run_ranks(ranks, mixed) == [(torch.bfloat16, True, True, True)] * ranks


# ---------------------------------------------------------------- refusals


def test_sizes_that_blocks_do_not_divide_are_a_sentence():
    for out, into, tokens in ((48, 64, 32), (64, 40, 32), (64, 64, 33)):
        model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(into, out)), recipe="mxfp8")
        with pytest.raises(
            Fp8Error, match=f"got {into} in_features, {out} out_features, {tokens} tokens. Pad the batch"
        ):
            model(torch.randn(tokens, into))
    with torch.no_grad():
        assert model(torch.randn(33, 64)).shape == (33, 64), "tokens are contracted in the backward alone"


def test_weights_of_other_layouts_are_refused_before_anything_changes():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 32, 32))

    experts = nn.Sequential(Experts())
    layouts = {Experts: f8.ExpertLayout(forward=lambda layer, x: x, weights=("up",))}
    with pytest.raises(Fp8Error, match="Experts cannot compute in MX"):
        f8.convert_to_float8_training(experts, recipe="mxfp8", experts=layouts)
    assert type(experts[0]) is Experts


def refusals(rank, ranks):
    mesh, told = init_device_mesh("cpu", (ranks,)), []
    columns = build(True, mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    traceable = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), recipe="mxfp8")
    for call in (lambda: columns(torch.ones(32, 64).bfloat16()), lambda: f8.fully_shard_traceable(traceable)):
        with pytest.raises(Fp8Error) as raised:
            call()
        told.append(str(raised.value))
    return told


@pytest.mark.distributed
def test_what_cannot_be_gathered_is_one_sentence_on_all_ranks(run_ranks):
    first, second = run_ranks(2, refusals)
    assert first == second
    columns, traceable = first
    assert "Shard it along dimension 0" in columns
    assert "gathers of fully_shard alone" in traceable
