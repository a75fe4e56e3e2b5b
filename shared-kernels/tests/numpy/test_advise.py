"""The model behind `fp8 advise`: by hand, against published runs, and what it refuses."""

import dataclasses
import json
import math

import pytest

from fp8_common import Fp8Error, _cli
from fp8_common.advise import ACCELERATORS, CHOICES, LINKS, SHAPES, Choice, Job, ModelShape, advise, estimate

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


def test_the_volumes_of_zero_plus_plus_come_out_but_for_its_second_shards():
    """In units of the model's size in 16 bits: 3 for ZeRO-3, 2.5 with 8-bit forward gathers, and so on (table 1)."""
    shape = dataclasses.replace(LLAMA, vocabulary=0)
    unit = 2 * shape.parameters * 63 / 64

    def volume(weights, gradients):
        choice = Choice(name="", products="bf16", weight_bytes=weights, gradient_bytes=gradients)
        found = estimate(job(shape=shape, ranks=64), choice)
        return found.gather_bytes / unit, found.reduce_bytes / unit

    assert volume(2, 2) == pytest.approx((2, 1))
    # theirs keeps the backward's gathers inside a node (hpZ), which is not modelled: of the gathers half is left there
    assert volume(1, 0.5) == pytest.approx((1, 0.25))


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


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"hidden_size": 8}', "has no intermediate_size"),
        (json.dumps(dict.fromkeys([*SIZES, "num_experts"], 8)), "mixture of experts"),
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
    assert "No way is 5 % faster than bf16" in advice.reason


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


def test_the_command_writes_json(capsys):
    assert _cli.main(["advise", "--linear", "1024x512,512x1024", "--blocks", "4", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 4 * 2 * 1024 * 512
    assert [one["choice"]["name"] for one in facts["estimates"]] == [choice.name for choice in CHOICES]
    assert all(math.isfinite(one["seconds"]) for one in facts["estimates"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--ranks", "eight"], "whole numbers like 8"),
        (["--linear", "4096"], "out x in"),
        (["--model", "no/such/file"], "cannot be read"),
        (["--device", "v100"], "invalid choice"),
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
