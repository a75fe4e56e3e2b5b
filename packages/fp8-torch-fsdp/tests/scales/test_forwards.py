"""Codes belong to their forward: a backward multiplies by them, whatever ran in between and whatever weights hold."""

import weakref

import pytest
import torch
import torch._functorch.config
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8_torch_fsdp as f8
from fp8_common import Fp8StaleError
from fp8_common.torch_layers.sharding import gathered
from fp8_torch_fsdp.scales import sync
from fp8_torch_fsdp.scales.forwards import Forwards
from fp8_torch_fsdp.scales.weight import CodeSnapshot
from fsdp_models import DIM, Mixture, mesh_of
from fsdp_situations import RECOMPUTE, SITUATIONS, WIDTH, Setting
from fsdp_training import batch
from tests.helpers.ranks import on_ranks

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")


PARTS = 4
"""The situations of a case, by default: one of so many parts, each in turn."""


def part_of(part):
    return tuple(SITUATIONS)[part::PARTS]


def wrong(setting, names=tuple(SITUATIONS)):
    """Return the situations whose gradients differ in a bit from those of the same forwards alone."""
    if "around, reentrant" in setting.recompute and setting.kind == "fully_shard":
        # FSDP2 loses gradients of such a sum in models of plain linear layers too (torch 2.15)
        names = [name for name in names if name != "two forwards, backward of the sum"]
    # for the situation with two backwards: compiled code may otherwise write into what the first one has read
    with torch._functorch.config.patch(donated_buffer=False):
        found = {name: SITUATIONS[name](setting) for name in names}
    pairs = {
        name: [(a, b) for run, other in zip(runs, wanted, strict=True) for a, b in zip(run, other, strict=True)]
        for name, (runs, wanted) in found.items()
    }
    return [name for name, own in pairs.items() if not all(torch.equal(a, b) for a, b in own)]


@pytest.mark.matrix(
    "each",
    recompute=list(RECOMPUTE),
    recipe=RECIPES,
    reshard=[True, False],
    kind=["fully_shard", "one group"],
    ranks=[2, 3, 1],
    part=range(PARTS),
)
@on_ranks(lambda given: given["ranks"])
def test_a_backward_multiplies_by_the_codes_of_its_forward(rank, recompute, recipe, reshard, kind, ranks, part):
    setting = Setting(recipe=recipe, rank=rank, reshard=reshard, recompute=recompute, kind=kind)
    found = wrong(setting, part_of(part))
    assert not found, found


@pytest.mark.matrix(
    "each",
    recipe=RECIPES,
    recompute=["nothing", "inside", "around", "wrapper outside"],
    reshard=[True, False],
    ranks=[2, 1],
    part=range(PARTS),
)
@on_ranks(lambda given: given["ranks"])
def test_so_does_that_of_compiled_blocks(rank, recipe, recompute, reshard, ranks, part):
    setting = Setting(recipe=recipe, rank=rank, reshard=reshard, recompute=recompute, compiled=True)
    found = wrong(setting, part_of(part))
    assert not found, found


def outcome(setting, name):
    """Return "right", "wrong", or how a situation is refused."""
    try:
        with torch._functorch.config.patch(donated_buffer=False):
            runs, wanted = SITUATIONS[name](setting)
    except RuntimeError as error:
        return next(reason for reason in REFUSALS if reason in str(error))
    if all(torch.equal(a, b) for run, other in zip(runs, wanted, strict=True) for a, b in zip(run, other, strict=True)):
        return "right"
    return "NaN" if any(one.isnan().any() for run in runs for one in run) else "wrong"


# Parameters are plain tensors there: autograd itself refuses to compute with those that were written to. And a weight
# that a checkpoint casts again has to be the one that its scale was made for; its gradients are NaN in compiled code.
REFUSALS = ("modified by an inplace operation", "scale of a weight of shape")


@pytest.mark.matrix(
    "each",
    recipe=RECIPES[:-1],
    recompute=["nothing", "inside", "inside, reentrant"],
    compiled=[False, True],
    part=range(PARTS),
)
@on_ranks(2)
def test_a_traceable_model_does_the_same_or_rejects(rank, recipe, recompute, compiled, part):
    setting = Setting(recipe=recipe, rank=rank, recompute=recompute, kind="traceable", compiled=compiled)
    found = {name: outcome(setting, name) for name in part_of(part)}
    assert "wrong" not in found.values(), found
    if recompute == "nothing" and not compiled:
        assert set(found.values()) == {"right"}, found
    every = [None, None]
    torch.distributed.all_gather_object(every, found)
    assert every[0] == every[1], "a rank refuses alone"


# ---------------------------------------------------------------- tensor parallelism, experts


class TensorParallel(Setting):
    """Blocks whose layers are cut over two ranks, and sharded over two others."""

    def shard_all(self, model):
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        plan = {"a": f8.Float8ColwiseParallel(), "b": f8.Float8RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=self.reshard)

    def inputs(self, seed):
        return batch(self.rank // 2, seed, (32, WIDTH))  # the ranks of a tensor-parallel group see the same rows


class WithExperts(Setting):
    """A dense layer and experts."""

    def make(self):
        return Mixture(4)

    def shard_all(self, model):
        fully_shard(model.experts, reshard_after_forward=self.reshard)
        fully_shard(model, reshard_after_forward=self.reshard)

    def inputs(self, seed):
        return batch(self.rank, seed, (32, DIM))


@pytest.mark.matrix("each", recipe=RECIPES[:-1], compiled=[False, True], reshard=[True, False], part=range(PARTS))
@on_ranks(4)
def test_tensor_parallel_layers_do_the_same(rank, recipe, compiled, reshard, part):
    found = wrong(TensorParallel(recipe=recipe, rank=rank, reshard=reshard, compiled=compiled), part_of(part))
    assert not found, found


@pytest.mark.matrix("each", recipe=RECIPES[:-1], reshard=[True, False], part=range(PARTS))
@on_ranks(2)
def test_experts_do_the_same(rank, recipe, reshard, part):
    found = wrong(WithExperts(recipe=recipe, rank=rank, reshard=reshard), part_of(part))
    assert not found, found


# ---------------------------------------------------------------- what holds it


@pytest.mark.parametrize("broken", ["nothing", "the hooks", "the hooks and the comparison in the layers"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_either_of_two_mechanisms_keeps_gradients_from_being_wrong(rank, broken, reshard):
    setting = Setting(recipe="tensorwise", rank=rank, reshard=reshard)
    with pytest.MonkeyPatch.context() as patch:
        if broken != "nothing":
            patch.setattr(Forwards, "watch", lambda self, output: None)
        if "comparison" in broken:
            patch.setattr(gathered, "check_codes", lambda *given: None)
        if broken == "the hooks":
            with pytest.raises(Fp8StaleError, match="another forward ran between the two"):
                wrong(setting, ["a teacher by mul_"])
        else:
            found = wrong(setting, ["a teacher by mul_"])
            assert found == ([] if broken == "nothing" else ["a teacher by mul_"])


@on_ranks(2)
def test_a_write_between_two_uses_of_a_module_belongs_to_the_second(rank):
    """Each use is a gather; the backward of each has the codes of its own."""

    def gradients_of(change):
        model = Setting(recipe="tensorwise", rank=rank, warm=0).build()
        block, x = model.blocks[0], batch(rank, 1, (32, WIDTH)).requires_grad_()
        used = []

        def twice(module, args):
            first = block(args[0])
            block.reshard()
            with torch.no_grad():
                for parameter in block.parameters() if change else ():
                    parameter.mul_(0.5)  # what outgrows its scale is refused
            used.append((first, block(args[0])))
            return (used[-1][0] + used[-1][1],)

        model.register_forward_pre_hook(twice)
        model(x)
        return [torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in used[-1]]

    plain, changed = gradients_of(change=False), gradients_of(change=True)
    assert torch.equal(plain[0], changed[0])
    assert not torch.equal(plain[1], changed[1])


@on_ranks(2)
def test_a_second_set_of_codes_lives_only_while_a_backward_waits_for_it(rank):
    made, before = [], CodeSnapshot.__init__

    def remember(self, weight, number, codes):
        before(self, weight, number, codes)
        made.append(weakref.ref(codes[0].untyped_storage()))

    def sets():
        return sum(one.nbytes() for ref in made if (one := ref()) is not None) / one_set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodeSnapshot, "__init__", remember)
        setting = Setting(recipe="tensorwise", rank=rank, warm=2)
        model = setting.build()
        one_set = sum(p.numel() for p in model.parameters()) // 2  # one byte for each element of a shard
        at_casts, quantize = [], sync.quantize
        patch.setattr(sync, "quantize", lambda weights: at_casts.append(sets()) or quantize(weights))
        found = {}
        loss = setting.loss(model, 1)
        found["after a forward"] = sets()
        loss.backward()
        found["after its backward, the loss is held"] = sets()
        with torch.no_grad():
            setting.output(model, 2)
        found["after an evaluation"] = sets()
        loss = setting.loss(model, 3)
        with torch.no_grad():
            setting.output(model, 4)
        found["a forward waits, another one has run"] = sets()
        loss.backward()
        found["after that backward"] = sets()
        first, second = setting.loss(model, 5), setting.loss(model, 6)
        found["two wait"] = sets()
        second.backward()
        found["the older waits"] = sets()
        first.backward()
        found["none waits"] = sets()
        setting.output(model, 7)
        setting.output(model, 8)
        found["outputs were dropped"] = sets()
    assert found == {
        "after a forward": 1.0,
        "after its backward, the loss is held": 1.0,
        "after an evaluation": 1.0,
        "a forward waits, another one has run": 2.0,
        "after that backward": 1.0,
        "two wait": 2.0,
        "the older waits": 2.0,
        "none waits": 1.0,
        "outputs were dropped": 1.0,
    }, found
    assert at_casts == [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], at_casts
