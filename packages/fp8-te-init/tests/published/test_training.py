"""Published weights on several ranks under FSDP2: bytes, gradients and losses beside a dequantized twin."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8Error
from fp8_common.torch.compat import local_of
from fp8_te_init.published import convert_published, load_published, save_published
from fp8_te_init.published.weight import published_of
from published_files import MOE, ODD, tensors_of, values_of, write
from published_models import (
    ATTENTION,
    Llama,
    adapt,
    batch,
    draw_adapters,
    fill_twin,
    loss_of,
)
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.tensors import same, whole

CONFIGS = {"odd": ODD, "moe": MOE}
WIDE_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROWS = {
    "as it is": {},
    "checkpointing": {"recompute": True},
    "accumulation": {"accumulate": 2},
    "gathered once": {"reshard_after_forward": False},
    "float32 adapters": {"adapter": torch.float32},
    "float32 model, gathered in bfloat16": {"dtype": torch.float32, "adapter": torch.float32, "mp_policy": WIDE_POLICY},
    "reduced in float32": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    "DoRA": {"magnitude": True},
    "DoRA, checkpointing": {"magnitude": True, "recompute": True},
    "loaded before it is sharded": {"early": True},
    "compiled": {"compiled": True},
}


def sharded(folder, config, *, published=True, early=False, **options):
    """Return a model under FSDP2, with adapters beside what `folder` holds, or its dequantized twin."""
    dtype, recompute = options.pop("dtype", torch.bfloat16), options.pop("recompute", False)
    adapters = {"dtype": options.pop("adapter", torch.bfloat16), "magnitude": options.pop("magnitude", False)}
    model = Llama(config, dtype=dtype)
    if published and early:
        load_published(model, folder)
    elif published:
        convert_published(model, folder)
    adapt(model, ATTENTION, **adapters)
    for layer in model.model.layers:
        layer.recompute = recompute
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if published:
        read = load_published(model, folder) if not early else None
    else:
        model.to_empty(device="cpu")
        fill_twin(model, folder, dtype)
        start_magnitudes(model, folder, dtype)
        read = None
    return draw_adapters(model), read


@torch.no_grad()
def start_magnitudes(model, folder, dtype):
    tensors = tensors_of(folder)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            values = values_of(tensors, f"{name.partition('.lora_')[0]}.weight", dtype)
            rows = torch.linalg.norm(values, dim=1).chunk(parameter.device_mesh.size())
            rank = parameter.device_mesh.get_local_rank()
            local_of(parameter).copy_(rows[rank] if rank < len(rows) else rows[0][:0])


def train(model, steps, *, accumulate=1, compiled=False):
    """Return losses of each step, and the gradients of the first."""
    if compiled:  # graphs end where those of published layers do
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear and name.endswith(("base_layer", "gate_proj", "up_proj", "down_proj")):
                module.forward = torch.compiler.disable(module.forward)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, grads = torch.optim.AdamW(trained, lr=3e-3), [], []
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(steps):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = loss_of(run, batch(step % 4 + 4 * micro))
            loss.backward()
        grads = grads or [whole(parameter.grad).clone() for parameter in trained]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads


@pytest.mark.matrix(world=[1, 2, 3], config=list(CONFIGS), layout=["deepseek", "compressed-channel", "modelopt"])
def test_each_rank_holds_its_rows_of_the_file_and_saves_them(run_ranks, tmp_path, world, config, layout):
    folder = write(tmp_path / "in", CONFIGS[config], layout)
    read = run_ranks(world, hold_and_save, str(folder), str(tmp_path / "out"), config)
    total = sum(tensor.nbytes for tensor in tensors_of(folder).values())
    assert max(read) < total / world + 140_000, "scales, and one expert of five more than the others have"
    assert sum(read) >= total - 200
    for file in folder.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def hold_and_save(rank, world, folder, out, config):
    model, loaded = sharded(folder, CONFIGS[config])
    tensors, held = tensors_of(folder), 0
    for name, parameter in model.named_parameters():
        weight, key = published_of(parameter), name.replace(".base_layer", "")
        if weight is None or weight.ndim == 3:
            continue
        rows = tensors[key].view(torch.uint8).chunk(world)
        assert same(weight.codes.view(torch.uint8), rows[rank])
        assert same(whole(parameter), values_of(tensors, key))
        held += len(weight)
    assert held
    with torch.no_grad():
        model(batch(0))  # leaves parameters of the root gathered
    save_published(model, out, folder)
    return loaded.bytes_read


@pytest.mark.matrix("each", row=list(ROWS), world=[2, 3, 1], config=["odd", "moe"])
def test_losses_and_gradients_are_those_of_a_dequantized_twin_bit_for_bit(run_ranks, tmp_path, row, world, config):
    config = "odd" if row == "compiled" else config
    folder = write(tmp_path, CONFIGS[config])
    run_ranks(world, compare_with_twin, str(folder), config, ROWS[row])


def compare_with_twin(rank, world, folder, config, row, steps=3):
    options = dict(row)
    loop = {name: options.pop(name) for name in ("accumulate", "compiled") if name in options}
    results = [
        train(sharded(folder, CONFIGS[config], published=published, **options)[0], steps, **loop)
        for published in (True, False)
    ]
    assert results[0][0] == results[1][0]
    assert len(results[0][1]) == (24 if row.get("magnitude") else 16)
    assert all(map(same, results[0][1], results[1][1]))
    assert all(grad.any() for grad in results[0][1])


@pytest.mark.distributed
def test_fifty_steps_of_lora_on_two_ranks_lose_what_the_twin_loses(run_ranks, tmp_path):
    folder = write(tmp_path, ODD, "qwen")
    run_ranks(2, compare_with_twin, str(folder), "odd", {}, 50)


@pytest.mark.distributed
def test_a_gather_sends_one_byte_for_each_weight_and_no_scales(run_ranks, tmp_path):
    run_ranks(2, count_bytes, str(write(tmp_path)))


def count_bytes(rank, world, folder):
    model, _ = sharded(folder, ODD)
    weights = [weight for p in model.parameters() if (weight := published_of(p)) is not None]
    other = [local_of(p) for p in model.parameters() if published_of(p) is None]
    model(batch(0))
    model.reshard()
    with CollectiveCounter() as counter:
        model(batch(0))
    sent = counter.nbytes("all_gather")
    padded = sum(-(-weight.stored.shape[0] // 2) * weight.shape[1] for weight in weights)
    plain = sum(
        -(-p.shape[0] // 2) * (p.numel() // p.shape[0]) * 2 for p in model.parameters() if published_of(p) is None
    )
    assert sent == padded + plain
    assert padded <= 1.01 * sum(weight.numel() for weight in weights)
    assert counter.of("all_reduce") == []
    held = {w.stored.codes.untyped_storage().data_ptr(): w.stored.codes.nbytes for w in weights}
    assert sum(held.values()) == padded, "nothing is resident but this rank's rows"
    assert all(tensor.dtype == torch.bfloat16 for tensor in other)


@pytest.mark.distributed
def test_mistakes_are_the_same_error_on_all_ranks(run_ranks, tmp_path):
    run_ranks(2, make_mistakes, str(write(tmp_path)))


def make_mistakes(rank, world, folder):
    model = Llama(ODD)
    fully_shard(model)
    with pytest.raises(Fp8Error, match=r"q_proj.weight is distributed already: call convert_published before"):
        load_published(model, folder)
    model, _ = sharded(folder, ODD)
    with pytest.raises(Fp8Error, match="is the checkpoint that was loaded"):
        save_published(model, folder, folder)


@pytest.mark.matrix("each", layout=["deepseek", "deepseek-v4"], config=["odd", "moe"])
def test_torchs_state_dicts_of_sharded_models_hold_codes_and_load(run_ranks, tmp_path, layout, config):
    folders = [str(write(tmp_path / str(seed), CONFIGS[config], layout, seed=seed)) for seed in (0, 1)]
    run_ranks(2, exchange_states, folders, config)


def exchange_states(rank, world, folders, config):
    (model, _), (other, _) = (sharded(folder, CONFIGS[config]) for folder in folders)
    whole_of = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole_of)
    tensors = tensors_of(folders[0])
    for name, tensor in state.items():
        if name.endswith("q_proj.base_layer.weight"):
            assert same(tensor.squeeze(1), tensors[name.replace(".base_layer", "")].view(torch.uint8))
    adapters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    assert {name for name in adapters if "lora_" not in name} <= {name for name in state if "scale_inv" in name}
    before = model(batch(0)).detach()
    for given in (state, get_model_state_dict(model)):
        set_model_state_dict(other, given, options=StateDictOptions(full_state_dict=given is state))
        assert same(other(batch(0)).detach(), before)
        other, _ = sharded(folders[1], CONFIGS[config])
        assert not same(other(batch(0)).detach(), before)
    with torch.no_grad():
        other(batch(0))
    load_published(other, folders[0])  # into shards, while what the root had is still gathered
    other.reshard()
    assert same(other(batch(0)).detach(), before)


def test_distributed_data_parallel_trains_what_the_twin_does(run_ranks, tmp_path):
    run_ranks(2, train_replicas, str(write(tmp_path)))


def train_replicas(rank, world, folder):
    results = []
    for published in (True, False):
        model = Llama(ODD)
        if published:
            load_published(model, folder)
        adapt(model, ATTENTION, dtype=torch.bfloat16)
        if published:
            load_published(model, folder)
        else:
            model.to_empty(device="cpu")
            fill_twin(model, folder, torch.bfloat16)
        replica = DistributedDataParallel(draw_adapters(model))
        loss = loss_of(replica, batch(rank))
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(map(torch.equal, *results))
