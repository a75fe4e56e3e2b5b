"""The model behind `fp8 advise`: by hand, against published runs, and what it refuses."""

import dataclasses
import json
import math
import re

import pytest

from fp8_common import Fp8Error
from fp8_common._models import CONFIGS
from fp8_common.advise import (
    ACCELERATORS,
    CHOICES,
    LINKS,
    SHAPES,
    Choice,
    Job,
    ModelShape,
    advise,
    estimate,
    memory,
    report,
    rows_that_repay,
    shape_of,
)

LLAMA = SHAPES["llama3-8b"]
BF16 = CHOICES[0]


def job(**changes):
    return Job(**({"shape": LLAMA} | changes))


def test_one_block_by_hand():
    shape = ModelShape(blocks=1, width=100, weights=60_000, active=60_000)
    links = dataclasses.replace(LINKS["infiniband-400"], inside=1e6, latency=0.5)
    device = dataclasses.replace(ACCELERATORS["h100"], bf16=1e9, attention=1e8, bandwidth=1e9)
    found = estimate(job(shape=shape, ranks=4, tokens=20, sequence=10, links=links, accelerator=device), BF16)
    # 60,000 weights: two gathers in bf16 and a reduction in float32, of which 3/4 comes from others; nothing hides the
    # first gathers and the last reduction of a single block; latency for two doublings
    assert found.exposed == pytest.approx((2 * 2 + 4) * 60_000 * 3 / 4 / 1e6 + 3 * 2 * 0.5)
    linear, attention = 2 * 60_000 * 20 / 1e9, 2 * 10 * 100 * 20 / 1e8
    assert found.matmuls == pytest.approx(3 * linear + 3.5 * attention)
    assert found.casts == 0


def test_experts_with_too_few_rows_are_named():
    """The casts of a weight move 4 to 6 bytes per element; a row saves six FLOPs of it at the difference of rates."""
    low, high = rows_that_repay(ACCELERATORS["h100"])
    assert (round(low), round(high)) == (331, 497)
    assert rows_that_repay(ACCELERATORS["a100"]) == (math.inf, math.inf)
    few = job(shape=SHAPES["Qwen/Qwen3-30B-A3B"], ranks=64, links=LINKS["ethernet-100"], tokens=4096, sequence=4096)
    told = "An expert gets 256 rows of a micro-batch; casts of its weight pay from some 331 to 497 rows on"
    assert told in advise(few)[0]
    enough = dataclasses.replace(few, tokens=8192)
    assert "An expert" not in advise(enough)[0]
    assert advise(enough)[0].startswith("Take tensorwise")
    assert "An expert" not in advise(job(ranks=64, links=LINKS["ethernet-100"]))[0]
    assert shape_of("Mixtral-8x7B-v0.1").rows_per_expert == 0.25


def test_nodes_share_their_link():
    slow = dataclasses.replace(LINKS["infiniband-400"], inside=1e30, between=1e9, latency=0.0)
    shape = ModelShape(blocks=1, width=8, weights=1 << 20, active=1)
    found = estimate(job(shape=shape, ranks=32, links=slow), BF16)
    assert found.exposed == pytest.approx((2 + 2 + 4) * (1 << 20) * 3 / 4 / 8 / 1e9)


def test_one_rank_sends_nothing():
    large = dataclasses.replace(ACCELERATORS["h100"], memory=1e12)
    assert all(one.exposed == 0 for one in advise(job(ranks=1, accelerator=large))[1])


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
def test_a_configuration_that_is_none_raises(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Fp8Error, match=part):
        ModelShape.from_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ranks": 0}, "ranks must be a positive"),
        ({"ranks": 12}, "do not fill nodes"),
        ({"recompute": 2}, "share from 0 to 1"),
        ({"tokens": 10}, "10 tokens is less than one sequence of 8192"),
        ({"measured": 1e9}, "pass an Accelerator"),
    ],
)
def test_a_job_that_is_none_or_faster_than_the_model_raises(changes, part):
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


def test_the_gain_over_bf16_reductions_is_reported():
    advice, _ = advise(job(shape=SHAPES["llama3-70b"], ranks=64, links=LINKS["ethernet-100"]))
    assert advice.startswith(f"Take {CHOICES[-1].name}: 1.69x bf16 (1.50x bf16 with gradients reduced in bf16).")


# billions of parameters, where names do not give them: as the makers of the models do
BILLIONS = {
    "mistralai/Mixtral-8x7B-v0.1": 46.7, "mistralai/Mixtral-8x22B-v0.1": 140.6, "openai/gpt-oss-20b": 20.9,
    "meta-llama/Llama-2-7b-hf": 6.74, "meta-llama/Llama-3.2-1B": 1.24, "meta-llama/Llama-3.2-3B": 3.21,
    "Qwen/Qwen2.5-7B": 7.6, "mistralai/Mistral-7B-v0.3": 7.25, "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_are_known_by_name_have_their_size(name):
    named = re.search(r"-([\d.]+)[bB]\b", name)
    billions = BILLIONS.get(name) or float(named[1])
    assert SHAPES[name].parameters == pytest.approx(billions * 1e9, rel=0.03)


def test_a_model_is_found_by_its_name_file_or_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert shape_of("llama-3.1-8B") == shape_of("llama3-8b") == LLAMA
    assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json")) == shape_of("mixtral-8x7b-v0.1")
    with pytest.raises(Fp8Error, match=r"'llama-3.1-9b' is no file.* Similar names: meta-llama/Llama-3.1-8B"):
        shape_of("llama-3.1-9b")


def test_a_model_that_does_not_fit_raises_with_enough_devices():
    with pytest.raises(Fp8Error, match=r"on 1 device need 128 GB on each .* it has 80. Take at least 4 devices"):
        advise(job(ranks=1))
    assert memory(job(ranks=4)) < ACCELERATORS["h100"].memory
    with pytest.raises(Fp8Error, match="No number of devices is enough"):
        advise(job(accelerator=dataclasses.replace(ACCELERATORS["h100"], memory=1e9)))


def test_devices_without_fp8_units_are_advised_on_communication_alone():
    advice, estimates = advise(
        job(tokens=4096, sequence=4096, accelerator=ACCELERATORS["a100"], links=LINKS["pcie-100"])
    )
    assert [one.choice.rate for one in estimates] == [None] * 3
    assert "matmuls, FP8 all-gather" in estimates[2].choice.name
    assert advice.startswith("Take bf16, bf16 reduce-scatter: 1.33x bf16. ")


def test_the_report_has_the_lines_to_paste():
    lines = report(job(shape=SHAPES["llama3-70b"], ranks=64, links=LINKS["ethernet-100"])).splitlines()
    assert lines[2:5] == [
        '    fp8_torch_fsdp.convert_to_float8_training(model, recipe="tensorwise")',
        "    fully_shard(model)  # and its blocks",
        "    fp8_torch_fsdp.compress_communication(model, gradients=True)",
    ]
