"""Delayed scaling of stacked experts: each has the histories that a `Float8Linear` of its own would have."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common.torch import amax_to_scale
from fp8_torch_fsdp.scales.delayed import delayed_scales

OPERANDS = ("input", "weight", "grad_output")


class Experts(nn.Module):
    """One stack of matrices [experts, 16, 32] or transposed, each expert of another size."""

    def __init__(self, experts, *, transposed=False, first=0, dtype=torch.float32):
        super().__init__()
        self.transposed = transposed
        values = torch.stack([weight(first + expert) for expert in range(experts)]).to(dtype)
        self.weight = nn.Parameter(values.mT.contiguous() if transposed else values)


def weight(expert):
    generator = torch.Generator().manual_seed(expert)
    return torch.randn(16, 32, generator=generator) * 8.0 ** (expert % 4)


def forward(module, x, offsets):
    return module.grouped_product("weight", x, offsets)


def config_of(initial="dynamic", *, gather=True):
    return f8.Float8LinearConfig(
        recipe="tensorwise_delayed",
        delayed=f8.DelayedScalingConfig(initial=initial, history_len=3),
        all_gather=gather,
    )


def converted(module, config=None):
    layout = f8.ExpertLayout(forward=forward, weights=("weight",), transposed=getattr(module, "transposed", False))
    return f8.convert_to_float8_training(module, config=config or config_of(), experts={Experts: layout})


def layers_of(module, config):
    """Return one `Float8Linear` for each expert."""
    matrices = [w.t().contiguous() if module.transposed else w for w in module.weight.detach().clone()]
    layers = []
    for matrix in matrices:
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
        layer.weight = nn.Parameter(matrix.clone())
        layers.append(f8.convert_to_float8_training(layer, config=config))
    return nn.ModuleList(layers)


def run_layers(layers, x, grad, sizes):
    outputs, grads = [], []
    for layer, rows, dy in zip(layers, x.split(sizes), grad.split(sizes), strict=True):
        if not len(rows):
            # The weights of all experts are in use whenever the module is, as under FSDP2, which gathers them all.
            layer.fp8_weight.observe(layer.weight.detach().float().abs().amax())
            layer.weight.grad = torch.zeros_like(layer.weight)
            continue
        rows = rows.clone().requires_grad_()
        y = layer(rows)
        y.backward(dy)
        outputs.append(y.detach())
        grads.append(rows.grad)
    return torch.cat(outputs), torch.cat(grads)


# rows of each expert in each step: expert 1 gets its first ones late, expert 3 gets none
STEPS = [[5, 0, 17, 0], [3, 0, 0, 0], [0, 8, 130, 0], [2, 4, 1, 0], [1, 0, 40, 0], [6, 7, 2, 0]]


@pytest.mark.matrix(initial=["dynamic", "one"], transposed=[False, True], dtype=[torch.float32, torch.bfloat16])
def test_every_step_is_that_of_a_loop_over_experts(initial, transposed, dtype):
    config, module = config_of(initial), Experts(4, transposed=transposed, dtype=dtype)
    layers, low = layers_of(module, config), converted(module, config)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (low, layers)]
    generator = torch.Generator().manual_seed(4)
    for step, sizes in enumerate(STEPS):
        x = (torch.randn(sum(sizes), 32, generator=generator) * 4.0 ** (step % 3)).to(dtype)
        grad = (torch.randn(sum(sizes), 16, generator=generator) * 3.0 ** -(step % 4)).to(dtype)
        f8.synchronize_scales(low)
        f8.synchronize_scales(layers)
        rows = x.clone().requires_grad_()
        y = low(rows, torch.tensor(sizes).cumsum(0))
        y.backward(grad)
        wanted = run_layers(layers, x, grad, sizes)
        assert torch.equal(y.detach(), wanted[0])
        assert torch.equal(rows.grad, wanted[1])
        own = torch.stack([layer.weight.grad for layer in layers])
        assert torch.equal(low.weight.grad.mT if transposed else low.weight.grad, own)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    f8.synchronize_scales(low)
    f8.synchronize_scales(layers)
    for operand in OPERANDS:
        state = getattr(low, f"fp8_{operand}_weight")
        for name in ("scale", "history", "ready", "observed"):
            wanted = torch.stack([getattr(getattr(layer, f"fp8_{operand}"), name) for layer in layers])
            assert torch.equal(getattr(state, name), wanted), (operand, name)
    assert low.fp8_input_weight.history[0].unique().numel() > 1, "the window holds more than one step"
    assert low.fp8_input_weight.ready.tolist() == ([True, True, True, initial == "one"])


def test_an_evaluation_observes_nothing():
    low = converted(Experts(2))
    with torch.no_grad():
        low(torch.randn(4, 32), torch.tensor([2, 4]))
    low.eval()(torch.randn(4, 32), torch.tensor([2, 4]))
    assert all((state.observed < 0).all() for state in delayed_scales(low))


def test_the_state_is_saved_and_copied_and_removed():
    low = converted(Experts(3))
    low(torch.randn(6, 32), torch.tensor([2, 2, 6])).sum().backward()
    f8.synchronize_scales(low)
    state = f8.DelayedState(low).state_dict()
    assert state["fp8_input_weight.history"].shape == (3, 3)
    assert set(low.state_dict()) == {"weight"}
    twin = copy.deepcopy(low)
    assert twin.fp8["weight"].spec.input_scale is twin.fp8_input_weight
    assert twin.fp8["weight"].weight_cast.delayed is twin.fp8_weight_weight is not low.fp8_weight_weight
    other = converted(Experts(3, first=5))
    other.load_state_dict(low.state_dict())
    f8.DelayedState(other).load_state_dict(state)
    x, ends = torch.randn(6, 32), torch.tensor([2, 2, 6])
    for one in (twin, other):
        assert torch.equal(one(x, ends), low(x, ends))
        assert torch.equal(one.fp8_input_weight.scale, low.fp8_input_weight.scale)
    plain = f8.unconvert(low)
    assert set(plain.state_dict()) == {"weight"}
    assert not list(plain.children())


def test_a_step_without_a_synchronization_is_an_error():
    low = converted(Experts(2))
    low(torch.randn(4, 32), torch.tensor([2, 4])).sum().backward()
    for state in delayed_scales(low):
        state.late.copy_(state.observed >= 0)
    with pytest.raises(RuntimeError, match="not synchronized after the last optimizer step"):
        low.forward(torch.randn(4, 32), torch.tensor([2, 4]))


def test_an_edited_stack_takes_its_scales_anew():
    low = converted(Experts(2), config_of(gather=False))
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    x, ends = torch.randn(4, 32), torch.tensor([2, 4])
    for _ in range(2):
        low(x, ends).sum().backward()
        optimizer.step()
    with torch.no_grad():
        low.weight.mul_(torch.tensor([8.0, 1.0])[:, None, None])
    low(x, ends)
    amax = low.weight.detach().abs().amax((1, 2))
    state = low.fp8_weight_weight
    dynamic = amax_to_scale(amax, "e4m3")
    used = state.current(amax, record=False)
    assert torch.equal(used, torch.stack([dynamic[0], state.scale[1]])), "the edited expert's alone"


def test_compiled_steps_are_one_graph_and_the_same_bits():
    models = [converted(Experts(3)) for _ in range(2)]
    functions = [models[0], torch.compile(models[1], fullgraph=True, backend="aot_eager")]
    results = []
    for model, function in zip(models, functions, strict=True):
        generator, own = torch.Generator().manual_seed(2), []
        for _ in range(4):
            f8.synchronize_scales(model)
            x = torch.randn(9, 32, generator=generator).requires_grad_()
            model.weight.grad = None
            y = function(x, torch.tensor([4, 4, 9]))
            y.backward(y.detach())
            own += [y.detach(), x.grad, model.weight.grad]
        results.append(own + [buffer.clone() for buffer in model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Mixture(nn.Module):
    """A dense layer and experts of which every token takes the next one."""

    def __init__(self, experts, *, first=0, idle=0):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(32, 32)
        self.experts = Experts(experts, first=first)
        self.idle = idle

    def forward(self, x):
        x = self.dense(x)
        active = len(self.experts.weight) - self.idle
        ends = (torch.arange(len(self.experts.weight)) + 1).clamp(max=active) * (len(x) // active)
        return self.experts(x, ends)


def train(model, rank, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        loss = model(torch.randn(16, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(rank, world_size, experts, gather, cut):
    """Train; a rank's last experts get no token, more of them on rank 1."""
    model = converted(Mixture(experts, idle=1 + (rank == 1)), config_of(gather=gather))
    place = {} if cut is None else {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(cut * (p.ndim == 3))}
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.experts, mesh=mesh, **place)
    fully_shard(model, mesh=mesh)
    losses = train(model, rank)
    before = f8.float8_report(model).reductions
    losses += train(model, rank, steps=1)
    state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
    delta = f8.float8_report(model).reductions - before
    return losses, state | f8.DelayedState(model).state_dict(), delta


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "experts", "cut"), [(1, 4, None), (2, 3, None), (3, 4, None), (4, 3, None), (2, 3, 1), (4, 4, 2)]
)
def test_steps_equal_those_with_a_high_precision_gather(run_ranks, world_size, experts, cut):
    low, high = (run_ranks(world_size, sharded, experts, gather, cut) for gather in (True, False))
    for (losses, state, _), (expected, wanted, _) in zip(low, high, strict=True):
        assert losses == expected
        assert {n for n in state if not torch.equal(state[n], wanted[n])} == set()
    assert all(torch.equal(low[0][1][name], other[1][name]) for other in low for name in low[0][1])
    keys = low[0][1]["experts.fp8_input_weight.history"]
    assert keys.shape == (experts, 3)
    assert keys[:-2].all()
    assert not keys[-1].any(), "no rank had a token for the last expert"


@pytest.mark.distributed
def test_the_number_of_experts_changes_no_number_of_reductions(run_ranks):
    counts = {experts: run_ranks(2, sharded, experts, True, None)[0][2] for experts in (3, 8)}
    # before the forward, inputs and gradients together; the weights of each forward are looked at in it as well
    assert counts == {3: 1, 8: 1}


def expert_parallel(rank, world_size, gather):
    """EP 2 x FSDP 2: each pair of ranks holds two experts of its own; return the scales of this rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part"))
    mine = mesh["expert"].get_local_rank()
    model = converted(Mixture(2, first=2 * mine), config_of(gather=gather))
    fully_shard(model.experts, mesh=mesh["part"])
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    losses = train(model, rank)
    states = [model.experts.fp8_weight_weight, model.experts.fp8_input_weight]
    return losses, [state.scale.tolist() for state in states], model.dense.fp8_input.scale.item()


@pytest.mark.distributed
def test_expert_parallel_ranks_share_the_scales_of_their_experts_alone(run_ranks):
    low, high = (run_ranks(4, expert_parallel, gather) for gather in (True, False))
    assert low == high
    for index in (0, 1):
        scales = [found[1][index] for found in low]
        assert scales[0] == scales[1] != scales[2] == scales[3]
    assert len({dense for *_, dense in low}) == 1


def resumed(rank, world_size, folder):
    def build(first):
        model = converted(Mixture(3, first=first))
        fully_shard(model.experts)
        return fully_shard(model)

    model = build(0)
    train(model, rank)
    dcp.save({"model": model.state_dict(), "delayed": f8.DelayedState(model)}, checkpoint_id=folder)
    expected = train(model, rank)
    other = build(7)
    train(other, rank, steps=1)
    state = {"model": other.state_dict(), "delayed": f8.DelayedState(other)}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    return train(other, rank), expected


@pytest.mark.distributed
def test_a_checkpoint_continues(run_ranks, tmp_path):
    for found, expected in run_ranks(2, resumed, tmp_path / "saved"):
        assert found == expected


def traceable(rank, world_size):
    model = converted(Mixture(4))
    f8.fully_shard_traceable(model, mesh=init_device_mesh("cpu", (world_size,)))
    return train(model, rank), model.experts.fp8_input_weight.scale.tolist()


@pytest.mark.distributed
def test_the_traceable_way_to_shard_gives_the_same_losses(run_ranks):
    found = run_ranks(2, traceable)
    assert [losses for losses, _ in found] == [losses for losses, *_ in run_ranks(2, plain)]
    assert found[0][1] == found[1][1]


def plain(rank, world_size):
    model = converted(Mixture(4))
    fully_shard(model)
    return (train(model, rank),)
