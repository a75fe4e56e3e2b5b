"""Whoever writes to weights, in whatever way, on however many ranks: what a forward uses is what the weights hold now.

Two tables: how a step is made; and what is written, at which moment, by which ranks, under which recipe. In each cell
the output of a forward after each of three steps is that of a model that was never sharded and holds the present
values. Under delayed scaling gathered weights may be as far from the present values as FP8 rounds, and every window has
one entry for each optimizer step.
"""

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fp8_torch_fsdp as f8
from tests.helpers.fsdp_models import converted, seeded, shard
from tests.helpers.fsdp_training import batch, loss_of, plain_twin

STEPS = 3
RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]
ROUNDS = 0.07
"""How far E4M3 with a scale of now may be from a weight, relative to the largest; 2^-4 and what scales round."""


def layers():
    """Two blocks and a layer of the root; even shards on two ranks, which the flat gradients of L-BFGS want."""
    block = [nn.Sequential(nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 24, bias=False)) for _ in range(2)]
    return nn.Sequential(*block, nn.Sequential(nn.Linear(24, 10)))


class Run:
    """One training run.

    Attributes:
        model: The sharded model.
        parameters: The sharded parameters, as optimizers hold them.
        writes_here: Whether this rank takes part in what is written.
        kept: What a write keeps from one step to the next.
    """

    def __init__(self, recipe, ranks, folder=None):
        self.recipe, self.folder, self.kept = recipe, folder, {}
        self.model = shard(converted(seeded(layers), recipe))
        self.writes_here = ranks == "all" or dist.get_rank() == 0
        self.renew()

    def renew(self, kind=torch.optim.SGD, **options):
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **options})
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def locals(self):
        return [parameter._local_tensor for parameter in self.parameters]

    def backward(self, step):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch(dist.get_rank(), step))
        loss.backward()
        return loss

    def step(self, step):
        self.backward(step)
        self.optimizer.step()

    def error(self):
        """Return how far a forward is from the present weights: 0 or infinity unless scaling is delayed."""
        seen, handles = {}, []
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear):
                look = lambda layer, _, name=name: seen.update({name: layer.weight.dequantize()})  # noqa: E731
                handles.append(layer.register_forward_pre_hook(look))
        with torch.no_grad():
            y = self.model(batch(7))
        for handle in handles:
            handle.remove()
        if self.recipe != "tensorwise_delayed":
            return 0.0 if torch.equal(y, plain_twin(self.model, layers, self.recipe)(batch(7))) else float("inf")
        now = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        pairs = [(used, now[f"{name}.weight"]) for name, used in seen.items()]
        return max(float((used - wanted).abs().max() / wanted.abs().max()) for used, wanted in pairs)

    def entries(self):
        """Return the numbers of entries that the windows of weights have."""
        return {int((b > 0).sum()) for n, b in self.model.named_buffers() if n.endswith("fp8_weight.history")}


def check(results, recipe):
    for error, windows in results:
        assert error < ROUNDS
        assert windows == ({STEPS} if recipe == "tensorwise_delayed" else set())


# ---------------------------------------------------------------- how a step is made


def by(kind, **options):
    def step(run, number):
        if not run.kept:
            run.renew(kind, **options)
            run.kept["renewed"] = True
        run.step(number)

    return step


def lbfgs(run, step):
    own = run.kept.setdefault("lbfgs", torch.optim.LBFGS(run.parameters, lr=1e-2, max_iter=2))
    own.step(lambda: run.backward(step))


def sam(run, step):
    """Sharpness-aware minimisation: perturb, look again, put back, step."""
    run.backward(step)
    with torch.no_grad():
        moves = [0.05 * parameter.grad for parameter in run.parameters]
        torch._foreach_add_(run.parameters, moves)
    run.backward(step)
    with torch.no_grad():
        torch._foreach_sub_(run.parameters, moves)
    run.optimizer.step()


def in_a_thread(run, step):
    run.backward(step)
    thread = threading.Thread(target=run.optimizer.step)
    thread.start()
    thread.join()


class Outer(torch.optim.Optimizer):
    """An optimizer whose step makes that of another, as wrappers do."""

    def __init__(self, inner):
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def inside_of_another(run, step):
    run.backward(step)
    Outer(run.optimizer).step()


def with_a_foreign_one_inside(run, step):
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    foreign = torch.optim.SGD([other], lr=1.0)
    handle = run.optimizer.register_step_pre_hook(lambda *_: foreign.step())
    run.step(step)
    handle.remove()


def in_the_backward(run, step):
    if not run.kept:
        for parameter in run.parameters:
            own = torch.optim.SGD([parameter], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(lambda p, own=own: (own.step(), own.zero_grad()))
        run.kept["hooked"] = True
    loss_of(run.model, batch(dist.get_rank(), step)).backward()


def after_one_that_raised(run, step):
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(lambda: 1 // 0)
    run.step(step)


def compiled(run, step):
    run.backward(step)
    run.kept.setdefault("step", torch.compile(run.optimizer.step, backend="aot_eager"))()


def with_a_scaler(run, step):
    run.optimizer.zero_grad()
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))
    scaler.scale(loss_of(run.model, batch(dist.get_rank(), step))).backward()
    scaler.step(run.optimizer)
    scaler.update()


def skipped_on_one_rank(run, step):
    run.backward(step)
    if dist.get_rank() == 0 or step % 2:
        run.optimizer.step()


HOW_A_STEP_IS_MADE: dict[str, Callable] = {
    "SGD with momentum": by(torch.optim.SGD, momentum=0.9),
    "AdamW, fused": by(torch.optim.AdamW, fused=True),
    "the optimizer steps with a closure": lambda run, step: run.optimizer.step(lambda: run.backward(step)),
    "L-BFGS looks at the loss several times in a step": lbfgs,
    "sharpness-aware minimisation perturbs weights and puts them back": sam,
    "the optimizer steps in another thread": in_a_thread,
    "the optimizer steps inside of the step of another one": inside_of_another,
    "an optimizer of something else steps inside of the step": with_a_foreign_one_inside,
    "an optimizer for each parameter steps in the backward": in_the_backward,
    "a step raises before the one that counts": after_one_that_raised,
    "the optimizer's step is compiled": compiled,
    "a gradient scaler makes the step": with_a_scaler,
    "one rank skips every second step": skipped_on_one_rank,
}


def run_steps(rank, world_size, how, recipe):
    run, errors = Run(recipe, "all"), []
    for step in range(STEPS):
        HOW_A_STEP_IS_MADE[how](run, step)
        errors.append(run.error())
    return max(errors), run.entries()


@pytest.mark.distributed
@pytest.mark.matrix("each", how=list(HOW_A_STEP_IS_MADE), recipe=["tensorwise_delayed", "tensorwise", "rowwise"])
def test_no_weight_is_stale_however_a_step_is_made(run_ranks, how, recipe):
    check(run_ranks(2, run_steps, how, recipe, timeout=170.0), recipe)


# ---------------------------------------------------------------- what is written beside steps


def on_parameters(write):
    return lambda run, step: [write(parameter) for parameter in run.parameters]


def on_shards(write):
    return lambda run, step: [write(local) for local in run.locals]


def on_state_dict(write):
    return lambda run, step: [write(value.to_local()) for value in run.model.state_dict().values()]


def lookahead(run, step):
    slow = run.kept.setdefault("slow", [one.detach().clone() for one in run.locals])
    for local, own in zip(run.locals, slow, strict=True):
        own.lerp_(local, 0.5)
        local.copy_(own)


def exchange_data(local):
    """Not of plain parameters, whose `.data` FSDP2 itself does not look at again."""
    if isinstance(local, f8.ShardedFloat8Weight):
        local.data = local.plain.detach() * 3


def with_numpy(tensor):
    tensor.detach().numpy()[...] *= 1.5


def with_numpy_by_what_lives_on(run, step):
    for value in run.kept.setdefault("held", [value.to_local() for value in run.model.state_dict().values()]):
        with_numpy(value)


def multiply_at(tensor):
    """As fused kernels and bitsandbytes write: no operator, no version."""
    if tensor.numel():
        values = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        values[:] = [1.5 * value for value in values]


def grown(run):
    return {name: value * 1.5 for name, value in run.model.state_dict().items()}


def assign(run, step):
    """Other tensors, for which an optimizer is made anew."""
    run.model.load_state_dict(grown(run), assign=True)
    assert all(isinstance(one.weight._local_tensor, f8.ShardedFloat8Weight) for one in run.model[2])
    run.renew()


def empty_and_load(run, step):
    state = grown(run)
    run.model.to_empty(device="cpu")
    run.model.load_state_dict(state)


def load_in_place(run, step):
    dcp.save(grown(run), checkpoint_id=f"{run.folder}/{step}")
    dcp.load(run.model.state_dict(), checkpoint_id=f"{run.folder}/{step}")


def gather(run, step):
    local = run.locals[0]
    dist.all_gather_into_tensor(local.view(-1), torch.full((local.numel() // 2,), float(1 + dist.get_rank())))


def receive(local):
    """Only one of two ranks receives."""
    if dist.get_rank():
        dist.send(local * 2, 0)
    else:
        dist.recv(local, 1)


WRITES: dict[str, Callable] = {
    "operators on shards": on_shards(lambda local: torch._foreach_mul_([local], 1.5)),
    "operators on parameters": on_parameters(lambda parameter: parameter.mul_(1.5)),
    "operators on .data": on_parameters(lambda parameter: parameter.data.mul_(1.5)),
    "operators on what a state dict holds": on_state_dict(lambda value: value.data.mul_(1.5)),
    "initialisation": on_parameters(lambda parameter: nn.init.uniform_(parameter, -10, 10)),
    "lookahead": lookahead,
    "averages": on_parameters(lambda parameter: parameter.lerp_(torch.full_like(parameter, 100.0), 0.5)),
    "averages that are put in by .data": on_shards(exchange_data),
    "NumPy": on_state_dict(with_numpy),
    "NumPy through an alias that lives on": with_numpy_by_what_lives_on,
    "DLPack": on_shards(lambda local: torch.from_dlpack(local.detach()).mul_(1.5)),
    "a kernel by address": on_shards(multiply_at),
    "load_state_dict": lambda run, step: run.model.load_state_dict(grown(run)),
    "load_state_dict(assign=True)": assign,
    "to_empty and load": empty_and_load,
    "a checkpoint that is loaded in place": load_in_place,
    "all_reduce": on_shards(lambda local: dist.all_reduce(local.data)),
    "broadcast": on_shards(lambda local: dist.broadcast(local, 0)),
    "all_gather": gather,
    "recv": on_shards(receive),
}
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "recv")
TOGETHER = {*list(WRITES)[-8:], "averages"}  # all ranks have to call these


def after_the_step(run, step, write):
    run.step(step)
    write(run, step)


def after_a_synchronization(run, step, write):
    """Scales of torchao's precompute were stale then."""
    run.step(step)
    f8.synchronize_scales(run.model)
    write(run, step)


def after_an_evaluation(run, step, write):
    """Where nobody expects a change; FSDP2 keeps weights of the root gathered."""
    run.step(step)
    run.model.eval()
    with torch.no_grad():
        run.model(batch(7))
    run.model.train()
    write(run, step)


def between_forward_and_backward(run, step, write):
    run.optimizer.zero_grad()
    loss = loss_of(run.model, batch(dist.get_rank(), step))
    write(run, step)
    loss.backward()
    run.optimizer.step()


MOMENTS: dict[str, Callable] = {
    "after the step": after_the_step,
    "after an explicit synchronization": after_a_synchronization,
    "after an evaluation": after_an_evaluation,
    "between forward and backward": between_forward_and_backward,
}


def run_writes(rank, world_size, write, moment, ranks, recipe, folder):
    run, errors = Run(recipe, "all" if write in TOGETHER else ranks, folder), []
    writes = torch.no_grad()(WRITES[write]) if run.writes_here else lambda *_: None
    for step in range(STEPS):
        MOMENTS[moment](run, step, writes)
        errors.append(run.error())
    return max(errors), run.entries()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*:FutureWarning")
@pytest.mark.matrix(
    "each", write=list(WRITES), moment=list(MOMENTS), ranks=["all", "the first"], recipe=RECIPES, world_size=[2, 3]
)
def test_no_weight_is_stale_whoever_writes_to_it(run_ranks, tmp_path, write, moment, ranks, recipe, world_size):
    if write in ("load_state_dict(assign=True)", "to_empty and load") and moment == "between forward and backward":
        moment = "after the step"  # the backward has other tensors then
    world_size = 2 if write in COLLECTIVES else world_size
    check(run_ranks(world_size, run_writes, write, moment, ranks, recipe, str(tmp_path), timeout=170.0), recipe)
