"""The model behind `fp8 advise`: by hand, against published runs, and what it refuses."""

import dataclasses
import json
import math
import re
import sys

import pytest

from fp8_common import Fp8Error, _cli
from fp8_common.advise import (
    ACCELERATORS,
    CHOICES,
    LINKS,
    SHAPES,
    WORLD_SIZES,
    Choice,
    Job,
    ModelShape,
    advise,
    estimate,
    speed_ups,
)

LLAMA = SHAPES["llama3-8b"]
BF16 = CHOICES[0]


def job(**changes):
    settings = {"shape": LLAMA, "ranks": 8, "tokens": 8192, "sequence": 8192, "micro_batches": 1, "recompute": 0.0}
    machine = {"accelerator": ACCELERATORS["h100"], "links": LINKS["infiniband-400"]}
    return Job(**(settings | machine | changes))


def way(products, weights="FP8", gradients="FP8"):
    (found,) = [c for c in CHOICES if c.name == f"{products}, weights {weights}, gradients {gradients}"]
    return found


# ---------------------------------------------------------------- by hand


def test_one_block_by_hand():
    shape = ModelShape(blocks=1, width=100, linear=((300, 100), (100, 300)))
    links = dataclasses.replace(LINKS["infiniband-400"], node=8, inside=1e6, latency=0.5)
    device = dataclasses.replace(ACCELERATORS["h100"], bf16=1e9, attention=1e8, bandwidth=1e9)
    found = estimate(job(shape=shape, ranks=4, tokens=10, sequence=20, links=links, accelerator=device), BF16)
    # 60,000 weights: two gathers in bf16 and a reduction in float32, of which 3/4 comes from others
    assert found.gather_bytes == 2 * 2 * 60_000 * 3 / 4
    assert found.reduce_bytes == 4 * 60_000 * 3 / 4
    assert found.between_bytes == 0
    # nothing hides the first gathers and the last reduction of a single block; latency for two doublings
    assert found.exposed == pytest.approx(480_000 * 3 / 4 / 1e6 + 3 * 2 * 0.5)
    linear, attention = 2 * 60_000 * 10 / 1e9, 2 * 20 * 100 * 10 / 1e8
    assert found.products == pytest.approx(3 * linear + 3.5 * attention)
    assert found.casts == 0
    assert found.state_memory == 16 * 60_000 / 4


def test_nodes_share_what_crosses_between_them():
    two = estimate(job(ranks=16), BF16)
    one = estimate(job(ranks=8), BF16)
    moved = two.gather_bytes + two.reduce_bytes
    assert one.between_bytes == 0
    assert two.between_bytes == pytest.approx(moved * 16 / 15 / 2 / 8)


def test_one_rank_sends_nothing():
    found = estimate(job(ranks=1), way("tensorwise"))
    assert (found.exposed, found.gather_bytes, found.reduce_bytes) == (0, 0, 0)


def test_micro_batches_gather_again_and_reduce_once():
    one, four = (estimate(job(micro_batches=number), BF16) for number in (1, 4))
    assert four.gather_bytes == 4 * one.gather_bytes
    assert four.reduce_bytes == one.reduce_bytes
    assert four.products == pytest.approx(4 * one.products)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_better_machines_are_never_slower(choice):
    base = estimate(job(ranks=64), choice).seconds
    for part, name, factor in (
        ("accelerator", "bf16", 2),
        ("accelerator", "fp8", 2),
        ("accelerator", "bandwidth", 2),
        ("links", "inside", 2),
        ("links", "between", 2),
        ("links", "latency", 0.5),
    ):
        old = getattr(job(), part)
        better = dataclasses.replace(old, **{name: factor * getattr(old, name)})
        assert estimate(job(ranks=64, **{part: better}), choice).seconds <= base, name


# ---------------------------------------------------------------- against others


@pytest.mark.parametrize(
    ("weights", "gradients", "secondary", "volume"), [(2, 2, False, 3), (1, 0.5, False, 1.25), (1, 0.5, True, 0.75)]
)
def test_the_volumes_of_zero_plus_plus_come_out(weights, gradients, secondary, volume):
    """Between nodes, in units of the model in 16 bits: ZeRO-3; 8-bit gathers, 4-bit gradients; second shards too."""
    shape = dataclasses.replace(LLAMA, vocabulary=0)
    unit = 2 * shape.parameters * 7 / 8 / 8  # of one of the eight devices of a node, from seven other nodes
    choice = Choice(name="", products="bf16", weight_bytes=weights, gradient_bytes=gradients, secondary=secondary)
    assert estimate(job(shape=shape, ranks=64), choice).between_bytes / unit == pytest.approx(volume)


def test_second_shards_cross_nodes_once_for_all_micro_batches():
    shape = dataclasses.replace(LLAMA, vocabulary=0)
    plain, kept = (
        Choice(name="", products="bf16", weight_bytes=1.0, gradient_bytes=0.0, secondary=s) for s in (False, True)
    )
    four = job(shape=shape, ranks=16, micro_batches=4)
    assert estimate(four, plain).between_bytes == 8 * estimate(four, kept).between_bytes
    assert estimate(four, plain).gather_bytes == estimate(four, kept).gather_bytes
    memory = estimate(four, kept).state_memory - estimate(four, plain).state_memory
    assert memory == pytest.approx(shape.parameters / 8)
    slow = dataclasses.replace(four, links=LINKS["ethernet-100"])
    assert estimate(slow, kept).exposed < estimate(slow, plain).exposed
    inside = job(shape=shape, micro_batches=4)
    assert estimate(inside, plain).seconds == estimate(inside, kept).seconds
    assert estimate(inside, plain).state_memory == estimate(inside, kept).state_memory


# ---------------------------------------------------------------- shapes


def test_a_configuration_gives_the_shape_of_the_model(tmp_path):
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.from_config(tmp_path / "config.json") == LLAMA
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
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "whole", "active", "rel"),
    [
        (MIXTRAL, 46.7e9, 12.9e9, 0.01),
        (QWEN3_30B, 30.5e9, 3.3e9, 0.02),
        # three of its 61 blocks are dense, and count like the others
        (DEEPSEEK_V3, 671e9, 37e9, 0.06),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B", "DeepSeek-V3"],
)
def test_experts_are_gathered_whole_and_multiply_the_tokens_that_they_see(tmp_path, config, whole, active, rel):
    """Whole and active parameters as the makers of the models give them."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_config(tmp_path / "config.json")
    assert shape.parameters == pytest.approx(whole, rel=rel)
    assert shape.blocks * shape.active_weights + shape.other_weights == pytest.approx(active, rel=rel)
    dense = dataclasses.replace(shape, active=shape.experts)
    few, all_of_them = (estimate(job(shape=one), BF16) for one in (shape, dense))
    assert few.gather_bytes == all_of_them.gather_bytes
    assert few.products < all_of_them.products


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"hidden_size": 8}', "has no .*intermediate_size"),
        (json.dumps(dict.fromkeys([*SIZES, "num_experts"], 8)), "has no num_experts_per_tok"),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Fp8Error, match=part):
        ModelShape.from_config(tmp_path / "config.json")


@pytest.mark.parametrize("sizes", [{"experts": 4}, {"expert": ((8, 8),), "experts": 4, "active": 5}])
def test_experts_that_do_not_fit_are_refused(sizes):
    with pytest.raises(Fp8Error, match="Experts need"):
        dataclasses.replace(LLAMA, **sizes)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ranks": 0}, "ranks must be a positive"),
        ({"ranks": 12}, "do not fill nodes"),
        ({"recompute": 2}, "share from 0 to 1"),
        ({"tokens": 1.5}, "tokens must be"),
    ],
)
def test_a_job_that_is_none_is_refused(changes, part):
    with pytest.raises(Fp8Error, match=part):
        job(**changes)


def test_a_measurement_above_the_model_is_refused():
    with pytest.raises(Fp8Error, match="give an Accelerator"):
        estimate(job(measured=1e9), BF16)


# ---------------------------------------------------------------- advice


def test_fp8_is_not_recommended_where_it_gains_nothing():
    device = ACCELERATORS["h100"]
    slow = dataclasses.replace(device, fp8=device.bf16)
    advice = advise(job(accelerator=slow))
    assert advice.best.choice == BF16
    assert "Nothing is 5 % faster than bf16" in advice.reason


def test_the_simplest_of_equally_fast_ways_is_recommended():
    advice = advise(job())
    fastest = min(advice.estimates, key=lambda one: one.seconds)
    assert advice.best.seconds <= 1.02 * fastest.seconds
    assert advice.best.choice.weight_bytes == 2, "inside a node gathers are hidden, whatever they carry"
    far = advise(job(ranks=256, shape=SHAPES["llama3-70b"], links=LINKS["ethernet-100"]))
    assert far.best.choice.gradient_bytes < 2
    near = advise(job(ranks=256, shape=SHAPES["llama3-70b"]))
    assert far.speed_up(far.best) > near.speed_up(near.best) > 1, "the slower the network, the more bytes matter"


# ---------------------------------------------------------------- the command


def test_the_command_prints_each_number_of_ranks(capsys):
    assert _cli.main(["advise", "--ranks", "8,64", "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert "on 8 devices, modelled, not measured" in out
    assert "on 64 devices" in out
    assert out.count("take: ") == 2


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_the_command_says_first_what_to_take_and_then_the_fastest(options, capsys):
    ethernet = ["--model", "llama3-70b", "--ranks", "64", "--links", "ethernet-100"]
    assert _cli.main(["advise", *ethernet, *options]) == 0
    _, take, _, *rows = capsys.readouterr().out.splitlines()
    assert take.startswith("take: tensorwise, weights FP8, gradients FP8. ")
    # the gain over the best that bf16 can do, too: its gradients reduced in bf16
    assert re.search(r"1\.\d\dx over bf16 \(1\.\d\dx over bf16, gradients bf16\)", take)
    assert rows[0].startswith("  bf16  ")
    assert len(rows) == len(CHOICES) if options else len(rows) <= 8
    assert rows[-1].endswith("slower ones: --all") == (not options)


def test_the_command_writes_json(capsys):
    assert _cli.main(["advise", "--linear", "1024x512,512x1024", "--blocks", "4", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 4 * 2 * 1024 * 512
    assert [one["choice"]["name"] for one in facts["estimates"]] == [choice.name for choice in CHOICES]
    assert all(math.isfinite(one["seconds"]) for one in facts["estimates"])


def test_rates_of_ones_own_replace_those_of_the_preset(capsys):
    assert _cli.main(["advise", "--rates", "bf16=5e14,node=4,inside=1e11", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    machine, links = facts["job"]["accelerator"], facts["job"]["links"]
    assert (machine["bf16"], machine["fp8"], machine["source"]) == (
        5e14,
        ACCELERATORS["h100"].fp8,
        "given with --rates",
    )
    assert (links["node"], links["inside"], links["latency"]) == (4, 1e11, LINKS["infiniband-400"].latency)


def test_the_plot_shows_every_way_from_8_to_4096_devices(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot is drawn with matplotlib")
    assert _cli.main(["advise", "--plot", str(tmp_path / "advice.svg")]) == 0
    assert "take: " in capsys.readouterr().out
    drawn = (tmp_path / "advice.svg").read_text()
    assert drawn.lstrip().startswith("<?xml")
    lines = speed_ups(job())
    assert list(lines) == [choice.name for choice in CHOICES]
    assert WORLD_SIZES[0] == 8
    assert WORLD_SIZES[-1] == 4096
    assert set(lines["bf16"]) == {1.0}
    assert _cli.main(["advise", "--plot", str(tmp_path / "no" / "advice.svg")]) == 2
    assert "cannot be written as a picture" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert _cli.main(["advise", "--plot", str(tmp_path / "advice.svg")]) == 1
    told = capsys.readouterr()
    assert told.err.endswith("Run: pip install 'fp8-common[plot]'\n")
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--ranks", "eight"], "whole numbers like 8"),
        (["--linear", "4096"], "out x in"),
        (["--model", "no/such/file"], "cannot be read"),
        (["--device", "v100"], "invalid choice"),
        *(
            (["--rates", text], "positive numbers like")
            for text in ("bf16", "tf32=1", "fp8=-1", "inside=inf", "node=x")
        ),
    ],
)
def test_the_command_refuses_in_one_sentence(capsys, arguments, part):
    try:
        code = _cli.main(["advise", *arguments])
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1
