"""Streams of published weights to engines, with digests, also of what an engine has after its own step."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch_layers.export import serving_state_dict
from fp8_te_init.published import (
    Receiver,
    convert_published,
    load_published,
    rows_of,
    stream_tensors,
    stream_weights,
)
from fp8_te_init.published.digests import digest
from published_files import (
    MOE,
    ODD,
    VLLM_CODES,
    VLLM_SCALES,
    drawn_blocks,
    engine_requantizes,
    tensors_of,
    values_of,
    wide,
    write,
)
from published_models import Llama
from tests.helpers.tensors import same

LAYER = "model.layers.0.self_attn.q_proj"


def loaded(folder, config=ODD):
    model = Llama(config)
    load_published(model, folder)
    return model


def as_bytes(rows):
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()


def receive(receiver, buckets, change=None):
    """Return what arrived, by name, and the names of what was wrong."""
    arrived, wrong = {}, []
    for bucket in buckets:
        for name, first, rows, sent in bucket:
            name, data = (name, as_bytes(rows)) if change is None else change(name, as_bytes(rows).copy())
            if name is not None and not receiver.take(name, first, data, sent):
                wrong.append(name)
            if name is not None:
                arrived.setdefault(name, []).append((first, rows))
    return {
        name: torch.cat([rows for _, rows in sorted(parts, key=lambda p: p[0])]) for name, parts in arrived.items()
    }, wrong


@pytest.mark.parametrize("config", [ODD, MOE], ids=["odd", "moe"])
@pytest.mark.parametrize("layout", ["deepseek", "deepseek-v4", "modelopt"])
def test_an_engine_receives_the_files_tensors_in_buckets_and_its_digests_agree(tmp_path, config, layout):
    folder = write(tmp_path, config, layout)
    model, receiver = loaded(folder, config), Receiver(rows_of(folder))
    buckets = list(stream_weights(model, folder, bucket_bytes=40_000))
    assert len(buckets) > 10
    assert max(sum(one.rows.nbytes for one in bucket) for bucket in buckets) <= 40_000
    arrived, wrong = receive(receiver, buckets)
    tensors = tensors_of(folder)
    carried = {name for name in tensors if name.endswith("input_scale")}
    assert wrong == []
    assert set(receiver.missing()) == carried
    assert all(same(arrived[name].reshape(tensors[name].shape), tensors[name]) for name in tensors.keys() - carried)


def test_a_changed_byte_a_swapped_name_and_a_missing_expert_are_found_and_named(tmp_path):
    folder = write(tmp_path, MOE)
    model = loaded(folder, MOE)
    expert = "model.layers.0.mlp.experts.3"
    swap = {f"{expert}.up_proj.weight": f"{expert}.gate_proj.weight"}
    swap |= {there: here for here, there in swap.items()}

    def one_byte(name, data):
        if name == f"{LAYER}.weight":
            data[5, 7] ^= 1
        return name, data

    changes = {
        "byte": (one_byte, {f"{LAYER}.weight"}),
        "swap": (lambda name, data: (swap.get(name, name), data), set(swap)),
        "lost": (lambda name, data: (None if name == f"{expert}.down_proj.weight" else name, data), set()),
        "unknown": (lambda name, data: ("other" if name == "lm_head.weight" else name, data), {"other"}),
    }
    missing = {
        "byte": [f"{LAYER}.weight"],
        "swap": sorted(swap),
        "lost": [f"{expert}.down_proj.weight"],
        "unknown": ["lm_head.weight"],
    }
    for kind, (change, expected) in changes.items():
        receiver = Receiver(rows_of(folder))
        _, wrong = receive(receiver, stream_weights(model, folder), change)
        assert set(wrong) == expected, kind
        assert receiver.missing() == missing[kind], kind


def test_digests_of_parts_add_up_and_see_rows_columns_and_signs():
    rows = np.random.default_rng(0).integers(0, 256, (64, 40), dtype=np.uint8)
    whole = digest("w", 0, rows)
    assert (digest("w", 0, rows[:10]) + digest("w", 10, rows[10:])) % 2**64 == whole
    assert digest("v", 0, rows) != whole
    for change in (rows[::-1], rows[:, ::-1], np.where(np.arange(40) % 8 == 7, rows ^ 0x80, rows)):
        assert digest("w", 0, np.ascontiguousarray(change)) != whole


@pytest.mark.distributed
def test_ranks_send_their_rows_and_digests_add_up(run_ranks, tmp_path):
    folder = write(tmp_path, MOE)
    sums = run_ranks(2, digests_of_rank, str(folder))
    total = {}
    for name in tensors_of(folder):
        own = [one[name] for one in sums if name in one]
        total[name] = own[0] if "scale" in name else sum(own) % 2**64
    alone = {}
    for bucket in stream_weights(loaded(folder, MOE), folder):
        for one in bucket:
            alone[one.name] = (alone.get(one.name, 0) + one.digest) % 2**64
    assert total == alone


def digests_of_rank(rank, world, folder):
    model = Llama(MOE)
    convert_published(model, folder)
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer)
    torch.distributed.fsdp.fully_shard(model)
    load_published(model, folder)
    sums = {}
    for bucket in stream_weights(model, folder, bucket_bytes=100_000):
        for one in bucket:
            sums[one.name] = (sums.get(one.name, 0) + one.digest) % 2**64
    return sums


def requantized_values(codes, scale):
    codes, scale = engine_requantizes(codes, scale)
    return codes.float() * wide(scale, codes.shape)


def test_the_engine_of_these_tests_is_vllm():
    """A digest of what vLLM 0.33's own function made of these codes, on a CPU; see `test_with_vllm`."""
    codes, scale = drawn_blocks()
    codes, scale = engine_requantizes(codes, scale)
    assert digest("codes", 0, codes.view(torch.uint8).numpy()) == VLLM_CODES
    assert digest("scale", 0, scale.view(torch.uint8).numpy()) == VLLM_SCALES


def test_with_powers_of_two_an_engine_changes_no_value_when_it_makes_e8m0_scales(tmp_path):
    folder = write(tmp_path)
    model, tensors = loaded(folder), tensors_of(folder)
    arrived, wrong = receive(Receiver(rows_of(folder)), stream_weights(model, folder, power_of_2_scales=True))
    assert wrong == []
    name = f"{LAYER}.weight"
    codes, scale = arrived[name], arrived[f"{name}_scale_inv"]
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    values, exact = codes.float() * wide(scale, codes.shape), values_of(tensors, name, torch.float32)
    assert torch.equal(requantized_values(codes, scale), values)
    moved = requantized_values(tensors[name], tensors[f"{name}_scale_inv"])
    assert 0.01 < float((moved - exact).norm() / exact.norm()) < 0.05, "what float scales lose there"
    assert 0.01 < float((values - exact).norm() / exact.norm()) < 0.05, "rounded once, before the engine"
    assert same(arrived["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(codes.float().isnan(), torch.zeros(codes.shape, dtype=torch.bool))


def shrink_blocks(folder):
    """Let some blocks use a part of the range, as blocks do whose scales were not made of their own amax."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, codes in tensors.items():
            if name.endswith(".weight") and codes.dtype == torch.float8_e4m3fn:
                codes[:128] = (codes[:128].float() / 5).to(codes.dtype)
                codes[:, 128:] = (codes[:, 128:].float() * 0).to(codes.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("config", "layout"), [(ODD, "deepseek"), (MOE, "qwen"), (ODD, "modelopt-blocks"), (ODD, "deepseek-v4")]
)
@pytest.mark.parametrize("world", [1, 3])
def test_digests_of_powers_of_two_are_those_of_an_engine_after_its_own_step(run_ranks, tmp_path, config, layout, world):
    """The engine got the weights as they are; what it has after its step is checked against the other stream."""
    folder = shrink_blocks(write(tmp_path, config, layout))
    receiver, engine = Receiver(rows_of(folder)), tensors_of(folder)
    scales = [name for name, one in engine.items() if "scale" in name and one.ndim > 1 and one.dtype.itemsize > 1]
    for scale in scales:
        name, shape = scale.rpartition("_scale")[0], engine[scale].shape
        codes, new = engine_requantizes(engine[name], engine[scale].reshape(-(-len(engine[name]) // 128), -1))
        changed = not same(codes, engine[name])
        engine[name], engine[scale] = codes, new.to(engine[scale].dtype).reshape(shape)
        assert changed
    assert bool(scales) == (layout != "deepseek-v4"), "E8M0 scales stay"
    for sent in run_ranks(world, digests_after_the_step, str(folder), config):
        for name, first, rows, wanted in sent:
            whole = engine[name].view(1) if engine[name].ndim == 0 else engine[name]
            data = whole[first : first + rows].contiguous().view(torch.uint8).reshape(rows, -1).numpy()
            assert receiver.take(name, first, data, wanted), name
    assert receiver.missing() == []


def digests_after_the_step(rank, world, folder, config):
    model = Llama(config)
    convert_published(model, folder)
    for layer in model.model.layers:
        fully_shard(layer)
    load_published(model, folder)
    stream = stream_weights(model, folder, bucket_bytes=50_000, power_of_2_scales=True)
    return [(name, first, len(rows), wanted) for bucket in stream for name, first, rows, wanted in bucket]


@pytest.mark.distributed
def test_weights_in_high_precision_are_quantized_and_sent_from_shards(run_ranks):
    for layout, granularity in (("compressed-tensors", "rowwise"), ("deepseek", "blockwise_128x128")):
        sent = run_ranks(3, send_quantized, layout, granularity)
        expected, received = serving_state_dict(quantized_model(), casts_of(granularity), layout), {}
        receiver = Receiver({name: len(tensor) if tensor.ndim else 1 for name, tensor in expected.items()})
        for name, first, rows, told in [one for of_rank in sent for one in of_rank]:
            assert receiver.take(name, first, rows, told), name
            received.setdefault(name, {})[first] = rows
        assert receiver.missing() == []
        for name, tensor in expected.items():
            rows = np.concatenate([part for _, part in sorted(received[name].items())])
            assert rows.tobytes() == as_bytes(tensor if tensor.ndim else tensor.reshape(1)).tobytes(), name


def quantized_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 320), nn.GELU(), nn.Linear(320, 130, bias=False))


def casts_of(granularity):
    return dict.fromkeys(("0", "2"), CastRecipe(granularity=granularity))


def send_quantized(rank, world, layout, granularity):
    model = fully_shard(quantized_model())
    tensors = serving_state_dict(model, casts_of(granularity), layout)
    buckets = list(stream_tensors(tensors, bucket_bytes=30_000))
    assert max(sum(one.rows.nbytes for one in bucket) for bucket in buckets) <= 30_000
    with pytest.raises(Fp8Error, match="cut along another dimension"):
        list(stream_tensors({"w": distribute_tensor(torch.ones(4, 6), model[0].weight.device_mesh, [Shard(1)])}))
    return [(one.name, one.first, as_bytes(one.rows), one.digest) for bucket in buckets for one in bucket]
