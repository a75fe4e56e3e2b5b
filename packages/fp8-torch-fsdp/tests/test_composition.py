"""What large trainings combine with FSDP2 works with FP8 gathers too: one case for each row of the guide's table."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from tests.helpers.whole_states import unlike, whole

pytestmark = pytest.mark.distributed

DIM, STEPS = 24, 3
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 40), nn.Linear(40, DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def config_of(all_gather, recipe="tensorwise"):
    return f8.Float8LinearConfig.from_recipe_name(recipe, all_gather=all_gather)


def convert(model, all_gather=True, recipe="tensorwise", **options):
    return f8.convert_to_float8_training(model, config=config_of(all_gather, recipe), **options)


def blocks(all_gather=True, recipe="tensorwise"):
    torch.manual_seed(0)
    return convert(nn.Sequential(Block(), Block()), all_gather, recipe)


def shard(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def flat(world_size):
    return init_device_mesh("cpu", (world_size,))


def loss_of(model, rank, step=0):
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x).float() - 0.5).square().mean()


def train(model, rank, steps=STEPS, before_step=None):
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        if before_step is not None:
            losses.append(float(before_step(model)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parity(rank, mesh, recipe="tensorwise", before_step=None, change=None, **options):
    """Train with both gathers; checks that hold for every combination."""
    models = [shard(blocks(gather, recipe), mesh, **options) for gather in (True, False)]
    for model in models:
        if change is not None:
            change(model)
    losses = [train(model, rank, before_step=before_step) for model in models]
    casts = f8.float8_report(models[0]).casts
    return {
        "losses equal a high-precision gather's": losses[0] == losses[1],
        "weights equal a high-precision gather's": unlike(*(whole(model) for model in models)) == [],
        "one cast for each weight and step": casts == 4 * STEPS,
    }


# ---------------------------------------------------------------- one function for each row; it returns checks


def ddp(rank, world_size):
    def twin(wrap):
        model = blocks(True, "tensorwise_delayed")
        handled = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            loss = loss_of(handled, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            f8.synchronize_scales(model, group=dist.group.WORLD)
            losses.append(loss.item())
        return losses, whole(model)

    replicated, sharded = twin(DistributedDataParallel), twin(lambda model: shard(model, flat(world_size)))
    return {
        "losses equal FSDP2's": replicated[0] == sharded[0],
        "weights and histories equal FSDP2's": unlike(replicated[1], sharded[1]) == [],
    }


def hsdp(rank, world_size, shape):
    checks = {}
    for recipe in ("tensorwise", "tensorwise_delayed", "rowwise"):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for name, passed in parity(rank, mesh, recipe).items():
            checks[f"{recipe}: {name}"] = passed
    model = shard(blocks(True, "tensorwise_delayed"), mesh)
    train(model, rank)
    f8.synchronize_scales(model)
    histories = torch.cat([b for name, b in model.named_buffers() if name.endswith("history")])
    everywhere = [torch.empty_like(histories) for _ in range(world_size)]
    dist.all_gather(everywhere, histories)
    checks["replicas keep the same histories"] = all(torch.equal(histories, other) for other in everywhere)
    checks["they observed something"] = bool((histories > 0).any())
    return checks


def no_reshard(rank, world_size):
    return parity(rank, flat(world_size), reshard_after_forward=False)


def columns(rank, world_size):
    checks = {}
    for recipe in RECIPES:
        placed = parity(rank, flat(world_size), recipe, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        checks.update({f"{recipe}: {name}": passed for name, passed in placed.items()})
    return checks


def cpu_offload(rank, world_size, recipes=("tensorwise",)):
    checks = {}
    for recipe in recipes:
        placed = parity(rank, flat(world_size), recipe, offload_policy=CPUOffloadPolicy(pin_memory=False))
        checks.update({f"{recipe}: {name}": passed for name, passed in placed.items()})
    return checks


def upload(weight, *args, **kwargs):
    """What `weight.to("cuda")` gives on a machine with a GPU: a copy, gathered instead of the shard."""
    assert not kwargs.keys() - {"non_blocking"}
    return torch.ops.aten._to_copy.default(weight)


def cpu_offload_with_uploads(rank, world_size):
    original = f8.ShardedFloat8Weight.to
    f8.ShardedFloat8Weight.to = upload
    try:
        checks = cpu_offload(rank, world_size, RECIPES)
        return {name: passed for name, passed in checks.items() if "one cast" not in name}  # codes are not kept there
    finally:
        f8.ShardedFloat8Weight.to = original


def mixed_precision(rank, world_size):
    """The wire holds codes of the float32 weights; layers compute in bfloat16, gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(DIM, 40, bias=False), nn.Linear(40, DIM, bias=False)))
    shard(model, flat(world_size), mp_policy=policy)
    train(model, rank)
    casts = f8.float8_report(model).casts
    twin = convert(nn.Sequential(nn.Linear(DIM, 40, bias=False), nn.Linear(40, DIM, bias=False)))
    twin.load_state_dict(whole(model))
    x = torch.randn(8, DIM)
    y = model(x)
    y.float().sum().backward()
    return {
        "computes in bfloat16": y.dtype == torch.bfloat16,
        "gradients and weights are float32": {p.grad.dtype for p in model.parameters()} == {torch.float32},
        "output is that of float32 weights' codes": torch.equal(y, twin(x.bfloat16())),
        "one cast for each weight and step": casts == 2 * STEPS,
    }


def autocast(rank, world_size):
    def under_autocast(model):
        inner = model.forward

        def forward(x):
            with torch.autocast("cpu", torch.bfloat16):
                return inner(x)

        model.forward = forward

    return parity(rank, flat(world_size), change=under_autocast)


def checkpointing(rank, world_size, kind):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    options = {
        "reentrant": {"use_reentrant": True},
        "not reentrant": {"use_reentrant": False},
        "selective": {"use_reentrant": False, "context_fn": contexts},
    }[kind]

    def recompute(model):
        for block in model:
            block.forward = functools.partial(checkpoint, block.forward, **options)

    mesh, checks = flat(world_size), {}
    for recipe in ("tensorwise", "tensorwise_delayed"):
        plain, recomputed = (shard(blocks(True, recipe), mesh) for _ in range(2))
        recompute(recomputed)
        # a reentrant checkpoint needs an input with a gradient
        losses = []
        for model in (plain, recomputed):
            model.register_forward_pre_hook(lambda m, args: (args[0].requires_grad_(),))
            losses.append(train(model, rank))
        checks[f"{recipe}: losses equal those without"] = losses[0] == losses[1]
        checks[f"{recipe}: one cast for each weight and step"] = f8.float8_report(recomputed).casts == 4 * STEPS
        checks[f"{recipe}: weights and histories equal those without"] = not unlike(whole(plain), whole(recomputed))
    return checks


def save_products(context, operator, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def gradient_clipping(rank, world_size):
    def clip(model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return norm.full_tensor()

    return parity(rank, flat(world_size), before_step=clip)


class Adapted(nn.Module):
    """A frozen FP8 layer beside a trained low-rank product in high precision."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.lora_a, self.lora_b = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def lora(rank, world_size):
    models, before = [], None
    for gather in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), Adapted())
        convert(model, gather, module_filter_fn=lambda layer, name: "lora" not in name)
        for adapted in model:
            adapted.base.requires_grad_(False)
        models.append(shard(model, flat(world_size)))
    before = whole(models[0])
    losses = [train(model, rank) for model in models]
    states = [whole(model) for model in models]
    return {
        "losses equal a high-precision gather's": losses[0] == losses[1],
        "adapters equal a high-precision gather's": unlike(*states) == [],
        "only adapters change": all("lora" in name for name in unlike(before, states[0])),
        "adapters change": len(unlike(before, states[0])) == 4,
    }


def inference_mode(rank, world_size):
    model, twin = (shard(blocks(), flat(world_size)) for _ in range(2))
    x, checks = torch.randn(8, DIM), {}
    for each in (model, twin):  # FSDP2 itself cannot run its first forward in inference mode
        train(each, rank, steps=1)
    for step in range(2):
        with torch.inference_mode():
            under_inference = model(x).clone()
        with torch.no_grad():
            checks[f"output of step {step}"] = torch.equal(under_inference, twin(x))
        losses = train(model, rank, steps=1), train(twin, rank, steps=1)
        checks[f"training after it in step {step}"] = losses[0] == losses[1]
    checks["weights"] = unlike(whole(model), whole(twin)) == []
    return checks


def deepcopies(rank, world_size):
    """A copy before sharding is a model of its own."""
    original = blocks(True, "tensorwise_delayed")
    copied = copy.deepcopy(original)
    models = [shard(model, flat(world_size)) for model in (original, copied)]
    first = train(models[0], rank)
    untouched = whole(models[1])
    second = train(models[1], rank)
    return {
        "training the original leaves the copy alone": unlike(untouched, whole(blocks(True, "tensorwise_delayed")))
        == [],
        "both train alike": first == second and unlike(*(whole(model) for model in models)) == [],
    }


ROWS = {
    "DDP": (2, ddp),
    "HSDP 2x2": (4, functools.partial(hsdp, shape=(2, 2))),
    "HSDP 4x1": (4, functools.partial(hsdp, shape=(4, 1))),
    "reshard_after_forward=False": (2, no_reshard),
    "shards of columns": (2, columns),
    "CPU offload": (2, cpu_offload),
    "CPU offload, shards uploaded": (2, cpu_offload_with_uploads),
    "mixed precision": (2, mixed_precision),
    "autocast": (2, autocast),
    "activation checkpointing, reentrant": (2, functools.partial(checkpointing, kind="reentrant")),
    "activation checkpointing, not reentrant": (2, functools.partial(checkpointing, kind="not reentrant")),
    "activation checkpointing, selective": (2, functools.partial(checkpointing, kind="selective")),
    "gradient clipping": (2, gradient_clipping),
    "frozen base and LoRA": (2, lora),
    "inference_mode": (2, inference_mode),
    "deepcopy": (2, deepcopies),
}


def run_row(rank, world_size, name):
    return ROWS[name][1](rank, world_size)


@pytest.mark.parametrize("row", ROWS)
def test_composes_with(run_ranks, row):
    for checks in run_ranks(ROWS[row][0], run_row, row):
        assert checks
        assert [name for name, passed in checks.items() if not passed] == []


# ---------------------------------------------------------------- subclasses of nn.Linear


class WithChildren(nn.Linear):
    """Computes like nn.Linear, but owns another layer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.extra = nn.Linear(4, 4)


class OwnForward(WithChildren):
    def forward(self, x):
        return super().forward(x) + 1


def test_subclasses_keep_their_children_and_their_own_forward():
    model = nn.ModuleDict({"plain": WithChildren(8, 8), "own": OwnForward(8, 8)})
    names = [name for name, _ in model.named_parameters()]
    f8.convert_to_float8_training(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model["plain"], f8.Float8Linear)
    assert isinstance(model["plain"], WithChildren), "what the subclass adds is still there"
    assert copy.deepcopy(model["plain"]).extra is not model["plain"].extra
    assert isinstance(model["plain"].extra, f8.Float8Linear)
    assert type(model["own"]) is OwnForward
    assert isinstance(model["own"].extra, f8.Float8Linear)


@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrized_layers_are_refused_unless_filtered(parametrize):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": parametrize(nn.Linear(8, 8))})
    with pytest.raises(Fp8Error, match=r"b .*parametrized.*module_filter_fn"):
        f8.convert_to_float8_training(model)
    f8.convert_to_float8_training(model, module_filter_fn=lambda layer, name: name == "a")
    assert isinstance(model["a"], f8.Float8Linear)
    assert FSDPModule not in type(model["b"]).__mro__
