"""Random sequences of what users do with a model, against a twin of plain weights that casts them at each forward.

The twin holds float32 weights, or bfloat16 ones with float32 masters as TransformerEngine's models do, and computes the
same FP8 products; what is done to the FP8 model is done to it. Losses and masters must be equal bit for bit after every
operation (three recipes of four: the twin has no history for delayed scaling), and codes must be the rounding of the
masters in all. 20 programs by default, 300 with --full.
"""

import copy
import functools
import itertools
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import fp8_te_init as fti
from fp8_common.torch.compat import local_of
from primary_facts import rounded
from tests.helpers.primary_models import CastAtEachForward
from tests.helpers.sharded_models import mlp, shard
from tests.helpers.tensors import placed_like, whole

WIDTHS = (24, 40, 136, 16)
RECIPES = ["tensorwise", "rowwise", "blockwise", "tensorwise_delayed"]
OPERATIONS = [
    *("step", "step", "step", "skip", "load", "edit", "merge", "clone", "broadcast", "save_and_resume"),
    *("rescale", "average", "move", "look", "clear", "load_codes", "seed_again"),
]
MODES = [*["single"] * 6, "ddp", "fsdp", "fsdp", "fsdp"]


def plain(seed: int, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(WIDTHS, dtype)


class Program:
    """One sequence of operations on an FP8 model and on its twin.

    Args:
        seed: What everything is drawn from, the same on all ranks.
        rank: Batches differ between ranks.
        world_size: Ranks, for all but "single".
        mode: One of MODES.
        recipes: What to choose from.
    """

    def __init__(self, seed, mode="single", rank=0, world_size=1, recipes=RECIPES):
        self.choose, self.mode, self.rank, self.world_size = random.Random(seed), mode, rank, world_size
        self.sharded = mode == "fsdp"
        self.recipe = self.choose.choice(recipes)
        self.dtype = self.choose.choice([torch.float32, torch.float32, torch.bfloat16])
        self.preserve = self.choose.choice([True, True, True, False])
        self.spec = fti.convert_linear(nn.Linear(8, 8), recipe=self.recipe).spec
        # a twin without a history has other scales
        self.follows = self.recipe != "tensorwise_delayed"
        self.rule = self.choose.choice(
            [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})]
        )
        self.log, self.batches = [], 0

    def build(self, seed):
        """Build both; under DDP each rank draws weights of its own, and the first one's count."""
        own = seed + 1000 * self.rank if self.mode == "ddp" else seed
        if self.choose.random() < 0.5:
            self.net = fti.convert_linear(
                plain(own, self.dtype), recipe=self.recipe, preserve_high_precision_init_val=self.preserve
            )
        else:
            with fti.fp8_model_init(recipe=self.recipe, preserve_high_precision_init_val=self.preserve):
                self.net = plain(own, self.dtype)
        # While the values before rounding are kept, or masters live, edits act on them. `is_rounded`: the masters are
        # the rounding of what the twin holds, which computes the same.
        self.exact, self.is_rounded, self.optimizer = self.preserve, not self.preserve, None
        self.twin = self._twin_of(seed)
        self.wrapped, self.wrapped_twin = self.net, self.twin
        self.log.append(f"build {self.mode} {self.recipe} {self.dtype} {self.preserve}")

    def _twin_of(self, seed):
        twin = plain(seed, self.dtype)
        for layer in twin:
            layer.__class__, layer.spec = CastAtEachForward, self.spec
        return twin

    def rounded(self, values):
        return rounded(values.float(), self.recipe)

    # ------------------------------------------------------------ operations

    def wrap(self):
        if self.mode == "ddp":
            self.wrapped = DistributedDataParallel(self.net)
            self.wrapped_twin = DistributedDataParallel(self.twin)
        elif self.mode == "fsdp":
            shard(self.net, self.world_size)
            shard(self.twin, self.world_size)

    def optimize(self):
        cls, options = self.rule
        low = self.dtype == torch.bfloat16
        settings = {"round_through_dtype": low, **options}
        self.optimizer = fti.MasterOptimizer(cls, self.net.parameters(), **settings)
        make = functools.partial(fti.MasterOptimizer, cls) if low else cls
        self.reference = make(self.twin.parameters(), **options)
        self.is_rounded = not self.exact

    def master_of(self, layer):
        """Return what the twin trains of a layer's weight."""
        return self.reference.master_of(layer.weight) if self.dtype == torch.bfloat16 else layer.weight

    def seed(self):
        fti.seed_masters(self.optimizer, self.wrapped, fallback=None if self.exact else "dequantize")
        self.exact = False
        self.check("seed")

    def seed_again(self):
        if self.exact:
            self.seed()

    def round(self):
        """Let the twin hold rounded values too."""
        for layer in self.twin if self.is_rounded else ():
            self.set_twin(layer, self.rounded(whole(layer.weight.detach())))
        self.is_rounded = False

    def step(self, skip=False):
        generator = torch.Generator().manual_seed(1000 * self.batches + self.rank)
        self.batches += 1
        x = torch.randn(8, WIDTHS[0], generator=generator).to(self.dtype)
        losses = [(net(x).float() - 1).square().mean() for net in (self.wrapped, self.wrapped_twin)]
        for loss in losses:
            loss.backward()
        if self.sharded:
            with torch.no_grad():
                self.wrapped(x)  # an evaluation leaves the root's weights gathered: a step has to gather them anew
        if self.follows:
            assert same(*losses), " ".join(self.log)
        if not skip:
            self.round()
            self.optimizer.step()
            self.reference.step()
            self.exact = False
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        if self.sharded:
            with torch.no_grad():
                ours, theirs = self.wrapped(x), self.wrapped_twin(x)
            assert same(ours, theirs) or not self.follows, " ".join(self.log)
            self.net.reshard()
            self.twin.reshard()
        if not skip:
            self.check("step")

    def skip(self):
        self.step(skip=True)

    def load(self):
        """Load a plain checkpoint of float32 values."""
        source = plain(self.choose.randrange(100))
        state = {name: value.to(self.dtype) for name, value in source.state_dict().items()}
        if self.sharded:
            own = self.net.state_dict()
            state = {name: placed_like(value, own[name]) for name, value in state.items()}
        self.net.load_state_dict(state)
        with torch.no_grad():
            for layer, loaded in zip(self.twin, source, strict=True):
                set_to(layer.bias, loaded.bias.to(self.dtype))
        self.change(lambda w, given: given, [layer.weight.detach().to(self.dtype) for layer in source], ours=False)

    def edit(self):
        factor = self.choose.choice([0.5, 1.25, 100.0])
        self.change(lambda w: w * factor, ours=lambda weight: weight.mul_(factor))

    def put(self):
        factor = self.choose.choice([0.5, 0.75])

        def ours(weight):
            weight.data = weight.detach() * factor

        # reading gives rounded values, kept ones or not: what is put in their place is made of them
        self.change(lambda w: w * factor, ours=ours, reads=True)

    def merge(self):
        """Add a product of two thin matrices, as LoRA does."""
        generator = torch.Generator().manual_seed(self.choose.randrange(100))
        deltas = [
            (torch.randn(b, 2, generator=generator) @ torch.randn(2, a, generator=generator) * 0.01).to(self.dtype)
            for a, b in itertools.pairwise(WIDTHS)
        ]
        for layer, delta in zip(self.net, deltas, strict=True):
            with torch.no_grad():
                layer.weight.add_(placed_like(delta, layer.weight))
        self.change(lambda w, delta: w + delta, deltas, ours=False)

    def change(self, edit, given=None, *, ours=None, reads=False):
        """Do to the twin what was done to the FP8 weights, with the roundings that it goes through."""
        knows = self.exact or not (self.is_rounded or self.optimizer is None)
        for index, (layer, own) in enumerate(zip(self.twin, self.net, strict=True)):
            base = whole(layer.weight.detach())
            base = base if knows and not reads else self.rounded(base)
            values = edit(base.to(self.dtype), *(() if given is None else (given[index],)))
            with torch.no_grad():
                if ours:
                    ours(own.weight)
            self.set_twin(layer, values)
        self.is_rounded = not self.exact and self.optimizer is None

    @torch.no_grad()
    def set_twin(self, layer, values):
        for each in {id(t): t for t in (layer.weight, self.optimizer and self.master_of(layer))}.values():
            if each is not None:
                set_to(each, values)

    def broadcast(self):
        if self.mode == "ddp":
            fti.broadcast_weights_(self.net)

    def rescale(self):
        """Quantize anew with the scale of the present values: nothing changes but for delayed scaling."""
        self.round()
        fti.rescale_(self.net)
        self.check("rescale")

    @torch.no_grad()
    def average(self):
        """Put averages in the place of the weights for an evaluation, and the weights back: nothing changes."""
        forms = ["copies", "state dicts"] if self.sharded else ["data", "copies", "values", "state dicts"]
        how = "data" if self.optimizer is None else self.choose.choice(forms)
        before = [layer.weight.detach() * 1 for layer in self.net]
        backups = {
            "data": lambda: [layer.weight.data for layer in self.net],
            "copies": lambda: [layer.weight.detach().clone() for layer in self.net],
            "values": lambda: before,
            "state dicts": lambda: copy.deepcopy(self.net.state_dict()),
        }[how]()
        for layer, values in zip(self.net, before, strict=True):
            if how == "data":
                layer.weight.data = values * 0.75
            else:
                layer.weight.copy_(values * 0.75)
        if self.optimizer is None:
            self.exact = False  # a forward that no master waits for lets go of the values before rounding
        for what in ["forward"] if self.optimizer is None else self.choose.sample(["look", "export", "forward"], k=2):
            self.peek(what)
        if how == "state dicts":
            self.net.load_state_dict(backups)
        for layer, backup in zip(self.net, backups, strict=True) if how != "state dicts" else ():
            if how == "data":
                layer.weight.data = backup
            else:
                layer.weight.copy_(backup)
        self.check("average")

    @torch.no_grad()
    def peek(self, what):
        """Read something, which must change nothing that is read later."""
        if what == "look" and self.optimizer is not None:
            self.optimizer.master_of(self.net[0].weight)
        if what == "export":
            fti.export_fp32_state_dict(self.net, self.optimizer)
        if what == "forward":
            self.wrapped(torch.ones(2, WIDTHS[0], dtype=self.dtype))
            if self.sharded:
                self.net.reshard()
        if what == "save":
            self.net.state_dict()

    def look(self):
        self.peek(self.choose.choice(["look", "export", "forward", "save"]))

    def clear(self):
        for layer in self.net:
            primary = local_of(layer.weight)
            primary.clear_high_precision_init_val()
            assert primary.get_high_precision_init_val() is None
        self.exact = False

    def load_codes(self):
        """Load codes: of another model, which masters start from, or the present ones, which change nothing."""
        if self.choose.random() < 0.5:
            self.net.load_state_dict(copy.deepcopy(self.net.state_dict()))
            self.exact = False
            return
        source = plain(self.choose.randrange(100, 200), self.dtype)
        state = fti.convert_linear(copy.deepcopy(source), recipe=self.recipe).state_dict()
        if self.sharded:
            own = self.net.state_dict()
            state = {name: placed_like(value, own[name]) for name, value in state.items()}
        self.net.load_state_dict(state)
        with torch.no_grad():
            for layer, loaded in zip(self.twin, source, strict=True):
                set_to(layer.bias, loaded.bias)
                set_to(layer.weight, loaded.weight.detach())
        self.exact, self.is_rounded = False, True

    def move(self):
        """Go to another dtype and back, which changes neither codes nor scales."""
        if self.mode == "single":
            assert self.net.to("cpu") is self.net
            for layer in self.net:
                codes, scale = layer.weight.codes.view(torch.uint8).clone(), layer.weight_scale_e4m3.clone()
                layer.weight.data = layer.weight.data.clone()
                layer.to("cpu", self.dtype)
                assert torch.equal(layer.weight.codes.view(torch.uint8), codes)
                assert torch.equal(layer.weight_scale_e4m3, scale)

    def clone(self):
        if self.mode == "single":
            self.net, self.optimizer, self.twin, self.reference = copy.deepcopy(self.all_four())
            self.wrapped, self.wrapped_twin = self.net, self.twin

    def save_and_resume(self):
        """Save both models, build others with other values, and go on with these."""
        self.step()
        # torch loads no whole state of an SGD that has not stepped
        gathered = StateDictOptions(full_state_dict=self.rule[0] is torch.optim.AdamW)
        saved = (
            self.states(gathered) if self.sharded else copy.deepcopy([each.state_dict() for each in self.all_four()])
        )
        preserve, (cls, options) = self.preserve, self.rule
        self.preserve, self.rule = False, (cls, {"lr": 0.5})
        self.build(77)
        self.preserve, self.exact = preserve, False
        self.wrap()
        self.optimize()
        self.rule = cls, options
        if self.sharded:
            self.take(saved, gathered)
        else:
            for each, state in zip(self.all_four(), saved, strict=True):
                each.load_state_dict(state)
        self.is_rounded = False
        self.check("resume")

    def all_four(self):
        return self.net, self.optimizer, self.twin, self.reference

    def take(self, states, options=None):
        for name, (net, optimizer) in self.pairs().items():
            of_model, of_optimizer = states[name].values()
            set_state_dict(net, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)

    def pairs(self):
        return {"ours": (self.net, self.optimizer), "twin": (self.twin, self.reference)}

    def states(self, options=None):
        return {
            name: dict(zip(("model", "optimizer"), get_state_dict(*pair, options=options), strict=True))
            for name, pair in self.pairs().items()
        }

    # ------------------------------------------------------------ checks

    def check(self, after):
        if self.optimizer is None:
            return
        for layer, twin in zip(self.net, self.twin, strict=True):
            master = local_of(self.optimizer.master_of(layer.weight))
            rows = local_of(layer.weight).state
            codes = rows.quantized(master.to(self.dtype))
            assert torch.equal(codes, rows.local_codes), " ".join([after, *self.log])
            if self.follows:
                held = whole((twin.weight if self.is_rounded else self.master_of(twin)).detach())
                expected = self.rounded(held) if self.is_rounded else held
                assert same(master, local_of(placed_like(expected, layer.weight))), " ".join([after, *self.log])

    def run(self, length=10):
        self.build(self.choose.randrange(100))
        early = ["load", "edit", "merge", "put", "average", "clear"] if not self.sharded else []
        for name in self.choose.sample(early, k=self.choose.randrange(len(early) + 1)):
            self.do(name)
        self.wrap()
        self.optimize()
        if self.choose.random() < 0.7:
            self.do("seed")
        for _ in range(length):
            self.do(self.choose.choice(OPERATIONS))
        self.do("step")

    def do(self, name):
        self.log.append(name)
        getattr(self, name)()


def same(a, b):
    """Return whether values are equal, NaN too: edits by a factor of 100 make some programs diverge, both models."""
    return torch.equal(a.detach().nan_to_num(1e30), b.detach().nan_to_num(1e30))


def set_to(parameter, values):
    parameter.copy_(placed_like(values, parameter))


def on_ranks(rank, world_size, seed, mode, folder):
    program = Program(seed, mode, rank, world_size, RECIPES)
    program.run(length=5)
    if program.sharded:
        program.do("save_and_resume")
        dcp.save(program.states(), checkpoint_id=folder)
    return True


def resumed(rank, world_size, seed, mode, folder):
    """Go on with what another number of ranks has saved, under FSDP2."""
    program = Program(seed, "fsdp", rank, world_size, RECIPES)
    program.build(77)
    program.exact = False
    program.wrap()
    program.optimize()
    states = program.states()
    dcp.load(states, checkpoint_id=folder)
    program.take(states)
    program.is_rounded = False
    program.check("resume")
    for name in ("step", "edit", "step", "skip", "load", "step"):
        program.do(name)
    return True


def programs_of(mode, full):
    wanted = (300 if full else 20) * MODES.count(mode) // len(MODES)
    return range(1, wanted + 1)


def test_programs_of_one_process_follow_their_twins(full):
    for seed in programs_of("single", full):
        Program(seed).run()


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_programs_of_several_ranks_follow_their_twins(run_ranks, full, mode, tmp_path):
    for seed in programs_of(mode, full):
        folder = str(tmp_path / str(seed))
        assert all(run_ranks(2 + seed % 2, on_ranks, seed, mode, folder))
        if mode == "fsdp" and (full or seed % 2):
            assert all(run_ranks(3 - seed % 2, resumed, seed, mode, folder))
