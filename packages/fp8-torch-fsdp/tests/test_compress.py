"""FP8 communication alone: whose layers get which weights, what is chosen, and what is refused."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fsdp_models import Decoder, decoded, mesh_of, seeded, shard
from fsdp_training import batch
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.distributed


WIDTH = 96
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def blocks():
    """101 and 352 rows are no multiple of 2 or 3."""
    sizes = ((WIDTH, 352), (352, 101), (101, WIDTH))
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(*own) for own in sizes)) for _ in range(2)))


def backward(model, rank):
    """Run a step that gives every gradient its own size; return the output."""
    y = model(batch(rank, 0, (96, WIDTH)).bfloat16())
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach()


# ---------------------------------------------------------------- beside other things


@on_ranks(3)
def test_it_works_with_fp8_layers_which_keep_their_gather(rank):
    """Two models with FP8 layers and others in one group of FSDP2, the second with decoded weights in the others."""
    found = []
    for compressed in (True, False):
        model = seeded(blocks)
        f8.convert_to_float8_training(model, recipe="rowwise", module_filter_fn=["*.1"])
        if not compressed:
            for name, own in model.named_parameters():
                if name.endswith(("2.weight", "3.weight")):
                    own.data = decoded(own.bfloat16())
        shard(model, mp_policy=POLICY)
        if compressed:
            f8.compress_communication(model, gradients=False)
        backward(model, rank)
        with CollectiveCounter() as counter:
            y = backward(model, rank)
        report = {w.name: (w.wire, w.wire_bytes, w.why) for w in f8.float8_report(model).weights}
        found.append((y, [p.grad.full_tensor() for p in model.parameters()], counter.nbytes("all_gather"), report))
    (y, gradients, sent, report), (expected, wanted, wide, before) = found
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    assert sent < 0.75 * wide
    assert report["0.1.weight"] == before["0.1.weight"] == ("float8_e4m3fn", 352 * 96, "dynamic rowwise")
    # 352 = 11 * 32 and 101 = 3 * 32 + 5 values of a row
    assert report["0.2.weight"] == ("float8_e4m3fn", 101 * (352 + 11), "mx, for high-precision layers")
    assert report["0.3.weight"] == ("float8_e4m3fn", 96 * (101 + 4), "mx, for high-precision layers")
    assert report["0.2.bias"][0] == before["0.2.weight"][0] == "bfloat16"


@on_ranks(4)
def test_lists_of_modules_and_replicas_work_and_remove_brings_back_what_was_before(rank):
    mesh, model, twin = mesh_of(2, 2), seeded(blocks), seeded(blocks).bfloat16()
    for own in twin.parameters():
        own.data = decoded(own.data).bfloat16() if own.ndim > 1 else own.data
    fully_shard([model[0], model[1]], mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    weight = model[0].get_parameter("1.weight")
    handle = f8.compress_communication(model)
    assert torch.equal(backward(model, rank), backward(twin, rank))
    replicas = [torch.empty_like(weight.grad.to_local()) for _ in range(2)]
    dist.all_gather(replicas, weight.grad.to_local(), group=mesh.get_group("replicate"))
    assert torch.equal(*replicas)
    handle.remove()
    with CollectiveCounter() as counter:
        backward(model, rank)
    assert {one.dtype for one in counter.seen} == {torch.bfloat16, torch.float32}


# ---------------------------------------------------------------- what is chosen, and what it does


class Adapted(Decoder):
    def __init__(self, **options):
        super().__init__(**options)
        self.experts, self.lora_A = nn.Parameter(torch.randn(4, 32, 32)), nn.Linear(32, 4)


class Stage(nn.Module):
    """The last stage of a pipeline: a head, and no embedding that tells so."""

    def __init__(self):
        super().__init__()
        self.hidden, self.output = nn.Linear(32, 32), nn.Linear(32, 64)


INNER, ENDS = {"experts", "hidden.weight"}, {"embedding.weight", "lm_head.weight", "lora_A.weight", "positions.weight"}


@on_ranks(2)
def test_vectors_embeddings_heads_and_adapters_stay_wide_unless_they_are_asked_for(rank):
    for model, options, expected in (
        (Adapted(), {}, INNER),
        (Adapted(tied=True), {}, INNER),
        (Stage(), {}, {"hidden.weight"}),
        (Adapted(), {"parameters": ["*", "!experts"]}, ENDS | {"hidden.weight"}),
        (Adapted(), {"parameters": lambda parameter, name: name == "lm_head.weight"}, {"lm_head.weight"}),
    ):
        handle = f8.compress_communication(fully_shard(model), **options)
        assert {one.name for one in handle.report()} == expected
        gradients = {w.name for w in f8.float8_report(model).weights if w.gradient}
        assert gradients == expected, "both directions choose alike"


@on_ranks(3)
def test_the_report_says_what_a_gather_does_to_each_matrix(rank):
    """The same on all ranks, one of which has no row of the last matrix."""
    model = nn.Sequential(nn.Linear(64, 33, bias=False), nn.Linear(33, 64, bias=False), nn.Linear(64, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(33, 64))
        model[1].weight.copy_(torch.ones(64, 33))
        model[1].weight[:, 1::2] = 1.4 * 2.0**-16  # where 1 is 256 as a code, these are subnormal
        model[2].weight.zero_()
    handle = f8.compress_communication(fully_shard(model))
    found = ((one.name, one.shape, one.bytes, one.below_normal, one.error) for one in handle.report())
    ones, small, zeros = found
    assert ones == ("0.weight", (33, 64), 33 * (64 + 2), 0.0, 0.0)
    # 64 rows are 22 on each of three ranks; the 33rd value of a row has a block of its own
    assert small[:3] == ("1.weight", (64, 33), 3 * 22 * (33 + 2))
    assert small[3] == pytest.approx(16 / 33)
    assert 0 < small[4] < 1e-5
    assert zeros == ("2.weight", (2, 64), 3 * 1 * (64 + 2), 0.0, 0.0)


# ---------------------------------------------------------------- refusals


class OwnGather(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError("never gathered here")

    def fsdp_post_all_gather(self, *args, **options):
        raise AssertionError("never gathered here")


def own_gather():
    model = fully_shard(nn.Sequential(nn.Linear(32, 32, bias=False)))
    model[0].weight._local_tensor = model[0].weight._local_tensor.as_subclass(OwnGather)
    return model


def gradients_of(**settings):
    return lambda model: f8.GradientCompression(**settings)


def divided(model):
    for part in (*model, model):
        part.set_gradient_divide_factor(7.0)
    backward(model, 0)


def compress(**options):
    return lambda model: f8.compress_communication(model, **options)


REFUSED = {
    "Call fully_shard(model) first": lambda model: f8.compress_communication(seeded(blocks)),
    "or a GradientCompression, got 'FP8'": compress(gradients="FP8"),
    "weights and gradients are both False": compress(weights=False, gradients=False),
    "No matrix to compress": compress(parameters=["!*"]),
    "contradict": compress(parameters=["*", "!*.weight", "*.weight"]),
    "0.weight is a OwnGather, which defines its own all-gather": lambda model: f8.compress_communication(own_gather()),
    "reshard_after_forward with an integer does not work": lambda model: f8.compress_communication(
        fully_shard(nn.Sequential(nn.Linear(32, 32)), reshard_after_forward=2)
    ),
    "format": gradients_of(format="e3m4"),
    "rounding": gradients_of(rounding="up"),
    "seed": gradients_of(seed=2**32),
}
REFUSED_LATER = {
    "compressed already": compress(),
    "is compressed already": compress(weights=False),
    "set_force_sum_reduction_for_comms": divided,
}


def refusals(rank, ranks):
    model, told = shard(seeded(blocks), mp_policy=POLICY), []
    for calls in (REFUSED, REFUSED_LATER):
        for call in calls.values():
            with pytest.raises((Fp8Error, Fp8UnsupportedError)) as raised:
                call(model)
            told.append(str(raised.value))
        if calls is REFUSED:
            assert not any(weight.gradient for weight in f8.float8_report(model).weights), "nothing changed"
            f8.compress_communication(model)
    return told


def test_what_cannot_be_done_is_one_sentence_on_all_ranks(run_ranks):
    first, *others = run_ranks(4, refusals)
    assert others == [first] * 3
    words = [text.removeprefix("is ") for text in REFUSED | REFUSED_LATER]
    assert [part for part, text in zip(words, first, strict=True) if part not in text] == [], first


def storages_of_tensors():
    gc.collect()
    return {x.untyped_storage().data_ptr(): x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor}


@pytest.mark.parametrize("compressed", [False, True])
@on_ranks(2)
def test_codes_are_gone_once_they_are_decoded(rank, compressed):
    """Between gather and reshard a weight takes what it takes in bf16; with the codes beside it, half as much more."""
    model = nn.Linear(512, 512, bias=False)
    fully_shard(model, mp_policy=POLICY)
    if compressed:
        f8.compress_communication(model)
    model.unshard()
    model.reshard()
    # kept, so that none of another test is freed meanwhile and gives its address to a new one
    before = storages_of_tensors()
    model.unshard()
    made = [one for address, one in storages_of_tensors().items() if address not in before]
    assert sum(one.nbytes() for one in made) == 512 * 512 * 2
