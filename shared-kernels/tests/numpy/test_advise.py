"""The model behind `fp8 advise`: by hand, against published runs, and what it refuses."""

import dataclasses
import json

import pytest

from fp8_common import Fp8Error
from fp8_common.advise import ACCELERATORS, CHOICES, LINKS, SHAPES, Choice, Job, ModelShape, advise, estimate

LLAMA = SHAPES["llama3-8b"]
BF16 = CHOICES[0]


def job(**changes):
    return Job(**({"shape": LLAMA} | changes))


def test_one_block_by_hand():
    shape = ModelShape(blocks=1, width=100, weights=60_000, active=60_000)
    links = dataclasses.replace(LINKS["infiniband-400"], inside=1e6, latency=0.5)
    device = dataclasses.replace(ACCELERATORS["h100"], bf16=1e9, attention=1e8, bandwidth=1e9)
    found = estimate(job(shape=shape, ranks=4, tokens=10, sequence=20, links=links, accelerator=device), BF16)
    # 60,000 weights: two gathers in bf16 and a reduction in float32, of which 3/4 comes from others; nothing hides the
    # first gathers and the last reduction of a single block; latency for two doublings
    assert found.exposed == pytest.approx((2 * 2 + 4) * 60_000 * 3 / 4 / 1e6 + 3 * 2 * 0.5)
    linear, attention = 2 * 60_000 * 10 / 1e9, 2 * 20 * 100 * 10 / 1e8
    assert found.matmuls == pytest.approx(3 * linear + 3.5 * attention)
    assert found.casts == 0


def test_nodes_share_what_crosses_between_them():
    slow = dataclasses.replace(LINKS["infiniband-400"], inside=1e30, between=1e9, latency=0.0)
    shape = ModelShape(blocks=1, width=8, weights=1 << 20, active=1)
    found = estimate(job(shape=shape, ranks=32, links=slow), BF16)
    assert found.exposed == pytest.approx((2 + 2 + 4) * (1 << 20) * 3 / 4 / 8 / 1e9)


def test_one_rank_sends_nothing():
    assert all(one.exposed == 0 for one in advise(job(ranks=1))[1])


@pytest.mark.parametrize(
    ("choice", "throughput"),
    [
        (Choice("tensorwise with FP8 gather", 1.0, 123, 1.0), 7689.5),
        (Choice("row-wise with bf16 gather", 0.85, 200), 6768),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_runs_are_met_within_8_percent(choice, throughput):
    """torchao's float8 README: Llama 3 8B, 8 H100 limited to 500 of 700 W, 8192 tokens each, half recomputed."""
    rates = ACCELERATORS["h100"]
    limited = dataclasses.replace(
        rates, bf16=5 / 7 * rates.bf16, fp8=5 / 7 * rates.fp8, attention=5 / 7 * rates.attention, bandwidth=0.9 * 2.4e12
    )
    found = estimate(job(recompute=0.5, accelerator=limited, measured=6150.0), choice)
    assert 8192 / found.seconds == pytest.approx(throughput, rel=0.08)


def test_a_configuration_gives_the_shape_of_the_model():
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=0.001)
    assert SHAPES["llama3-70b"].parameters == pytest.approx(70.6e9, rel=0.001)


MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "whole", "active", "rel"),
    [(MIXTRAL, 46.7e9, 12.9e9, 0.01), (QWEN3_30B, 30.5e9, 3.3e9, 0.02)],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_experts_are_gathered_whole_and_multiply_the_tokens_that_they_see(tmp_path, config, whole, active, rel):
    """Whole and active parameters as the makers of the models give them."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_config(tmp_path / "config.json")
    assert shape.parameters == pytest.approx(whole, rel=rel)
    outside = shape.vocabulary * shape.width
    assert shape.blocks * shape.active + outside == pytest.approx(active, rel=rel)


SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"hidden_size": 8}', "has no .*intermediate_size"),
        (json.dumps(SIZES | {"num_experts": 8}), "has no num_experts_per_tok"),
        (json.dumps(SIZES | {"kv_lora_rank": 8}), "latent attention"),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Fp8Error, match=part):
        ModelShape.from_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ranks": 0}, "ranks must be a positive"),
        ({"ranks": 12}, "do not fill nodes"),
        ({"recompute": 2}, "share from 0 to 1"),
        ({"measured": 1e9}, "give an Accelerator"),
    ],
)
def test_a_job_that_is_none_or_faster_than_the_model_is_refused(changes, part):
    with pytest.raises(Fp8Error, match=part):
        estimate(job(**changes), BF16)


def test_fp8_is_not_recommended_where_it_gains_nothing():
    device = ACCELERATORS["h100"]
    advice, _ = advise(job(accelerator=dataclasses.replace(device, fp8=device.bf16)))
    assert advice.startswith("Take bf16: nothing is 5% faster")


def test_the_simplest_of_equally_fast_configurations_is_recommended():
    advice, estimates = advise(job(ranks=64, micro_batches=4))
    assert min(estimates, key=lambda one: one.seconds).choice is CHOICES[-1]
    assert advice.startswith(f"Take {CHOICES[3].name}")


def test_the_gain_over_gradients_reduced_in_bf16_is_said_too():
    advice, _ = advise(job(shape=SHAPES["llama3-70b"], ranks=64, links=LINKS["ethernet-100"]))
    assert advice.startswith(f"Take {CHOICES[-1].name}: 1.69x bf16 (1.50x bf16 with gradients reduced in bf16).")
