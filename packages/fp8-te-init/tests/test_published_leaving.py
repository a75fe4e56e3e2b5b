"""What leaves a model of published weights: streams to engines with digests, and merged adapters."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fp8_common import CastRecipe, Fp8Error, Fp8UnsupportedError
from fp8_common.torch_layers.export import serving_state_dict
from fp8_te_init.published import (
    Receiver,
    convert_published,
    load_published,
    merge_adapter,
    merge_report,
    rows_of,
    save_published,
    stream_tensors,
    stream_weights,
)
from fp8_te_init.published.digests import digest
from fp8_te_init.published.weight import published_of
from tests.helpers.published_files import MOE, ODD, tensors_of, values_of, wide, write
from tests.helpers.published_models import ALL, Llama, adapt, batch, draw_adapters
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


def engine_requantizes(codes, scale):
    """vLLM 0.33, `requant_weight_ue8m0_inplace`: amax of decoded blocks, the next power of two, rounded again."""
    values = codes.float() * wide(scale.float(), codes.shape)
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 128, 0, -values.shape[0] % 128))
    amax = padded.view(padded.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)).clamp(min=1e-4)
    new = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (values / wide(new, values.shape)).to(torch.float8_e4m3fn).float() * wide(new, values.shape)


def test_with_powers_of_two_an_engine_changes_no_value_when_it_makes_e8m0_scales(tmp_path):
    folder = write(tmp_path)
    model, tensors = loaded(folder), tensors_of(folder)
    arrived, wrong = receive(Receiver(rows_of(folder)), stream_weights(model, folder, power_of_2_scales=True))
    assert wrong == []
    name = f"{LAYER}.weight"
    codes, scale = arrived[name], arrived[f"{name}_scale_inv"]
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    values, exact = codes.float() * wide(scale, codes.shape), values_of(tensors, name, torch.float32)
    assert torch.equal(engine_requantizes(codes, scale), values)
    moved = engine_requantizes(tensors[name], tensors[f"{name}_scale_inv"])
    assert 0.01 < float((moved - exact).norm() / exact.norm()) < 0.05, "what float scales lose there"
    assert 0.01 < float((values - exact).norm() / exact.norm()) < 0.05, "rounded once, before the engine"
    assert same(arrived["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(codes.float().isnan(), torch.zeros(codes.shape, dtype=torch.bool))


# ---------------------------------------------------------------- merges


def with_delta(folder, size):
    """Return a model with adapters whose deltas have this share of the weights' norms."""
    model = draw_adapters(adapt(loaded(folder), ALL, rank=16, dtype=torch.float32))
    for layer in model.modules():
        if hasattr(layer, "lora_B"):
            factor = (
                size * layer.base_layer.weight.dequantize().float().norm() / layer.get_delta_weight("default").norm()
            )
            layer.lora_B["default"].weight.data.mul_(factor)
    return model


@pytest.mark.parametrize(
    ("size", "share", "error", "advice"),
    [
        (1e-3, (0.02, 0.08), (0.95, 1.0), "apart"),
        (1e-2, (0.3, 0.5), (0.8, 0.9), "bfloat16"),
        (3e-2, (0.7, 0.9), (0.5, 0.7), "bfloat16"),
    ],
)
def test_the_report_says_how_little_of_an_adapter_arrives_in_codes(tmp_path, size, share, error, advice):
    model = with_delta(write(tmp_path), size)
    before = {
        name: weight.codes.clone() for name, p in model.named_parameters() if (weight := published_of(p)) is not None
    }
    report = merge_report(model)
    assert len(report) == 14
    for one in report:
        assert one.size == pytest.approx(size, rel=0.01)
        assert share[0] < one.share < share[1]
        assert error[0] < one.error < error[1]
        assert one.copy_error < one.error or size == 1e-3
        assert one.advice == advice
    assert f"{LAYER}" in str(report)
    assert all(same(published_of(model.get_parameter(name)).codes, codes) for name, codes in before.items())


def test_a_merge_is_what_the_report_said_and_codes_are_saved(tmp_path):
    folder = write(tmp_path / "in")
    model = with_delta(folder, 3e-2)
    (one, *_) = merge_report(model)
    layer = model.get_submodule(one.name)
    old, delta = layer.base_layer.weight.dequantize().float(), layer.get_delta_weight("default").detach()
    wanted = model(batch(0)).detach()
    merge_adapter(model, [one.name], into="codes")
    arrived = layer.base_layer.weight.dequantize().float() - old
    assert float((arrived - delta).norm() / delta.norm()) == pytest.approx(one.error, abs=0.1)
    assert not layer.get_delta_weight("default").any()
    save_published(model, tmp_path / "out", folder)
    tensors, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert {name for name in tensors if not same(tensors[name], before[name])} == {f"{one.name}.weight"}
    names = [other.name for other in merge_report(model) if other.name != one.name]
    merge_adapter(model, names, into="bfloat16")
    assert published_of(model.get_submodule(names[0]).base_layer.weight) is None
    assert model.get_submodule(names[0]).base_layer.weight.dtype == torch.bfloat16
    got = model(batch(0)).detach()
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    assert not any(f"{name}.base_layer.weight_scale_inv" in model.state_dict() for name in names)


def test_what_cannot_be_merged_is_an_error(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(Fp8Error, match="no adapter 'default' beside a published weight"):
        merge_report(loaded(folder))
    model = with_delta(folder, 1e-2)
    with pytest.raises(Fp8Error, match="No adapter 'default' beside published weights at lm_head"):
        merge_adapter(model, ["lm_head"], into="codes")
    with pytest.raises(Fp8Error, match='into must be "bfloat16" or "codes"'):
        merge_adapter(model, [LAYER], into="float32")
    dora = adapt(loaded(folder), ("q_proj",), magnitude=True)
    with pytest.raises(Fp8UnsupportedError, match=rf"{LAYER} has DoRA"):
        merge_report(dora)


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
