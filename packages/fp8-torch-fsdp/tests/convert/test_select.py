"""Which layers compute in FP8: heads, adapters, filters; what report and log say of them is what they do."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fsdp_models import Decoder


def no_head(layer, name):
    return name != "lm_head"


WIDE = "gathered in high precision"
SHARED = f"weight shared with embedding, {WIDE}"
HEADS = {
    "a head that is an embedding too stays in high precision": (True, {}, False, "bfloat16", SHARED),
    "a tied head that is asked for computes in FP8": (True, {"heads": True}, True, "bfloat16", SHARED),
    "a head with a weight of its own stays too": (False, {}, False, "bfloat16", f"weight {WIDE}"),
    "a head that is asked for": (False, {"heads": True}, True, "float8_e4m3fn", "weight gathered in FP8"),
    "a head that the filter leaves": (
        False,
        {"heads": True, "module_filter_fn": no_head},
        False,
        "bfloat16",
        f"weight {WIDE}",
    ),
    "the filter has the last word": (True, {"heads": True, "module_filter_fn": no_head}, False, "bfloat16", SHARED),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("case", HEADS)
def test_heads(case, recipe):
    tied, options, fp8, wire, words = HEADS[case]
    model = f8.convert_to_float8_training(Decoder(tied=tied).bfloat16(), recipe=recipe, **options)
    assert (model.lm_head.weight is model.embedding.weight) == tied
    assert isinstance(model.lm_head, f8.Float8Linear) == fp8
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    assert torch.equal(model.lm_head(x), nn.functional.linear(x, model.lm_head.weight.detach().clone())) != fp8
    assert type(model.embedding.weight) is nn.Parameter, "an embedding is looked up as it is"
    report = f8.float8_report(model)
    (weight,) = [weight for weight in report.weights if weight.head]
    assert (weight.name, weight.fp8, weight.wire) == ("embedding.weight" if tied else "lm_head.weight", fp8, wire)
    assert weight.head == f"Output head lm_head: {'FP8' if fp8 else 'high-precision'} matmul, {words}."
    assert weight.head in report.headline
    assert [one.fp8 for one in report.weights if one.name == "positions.weight"] == [False]
    assert type(f8.unconvert(model).lm_head) is nn.Linear
    assert (model.lm_head.weight is model.embedding.weight) == tied


def test_layers_of_a_model_as_wide_as_its_vocabulary_are_no_heads():
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 32), "out": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    report = f8.float8_report(f8.convert_to_float8_training(model))
    assert [weight.name for weight in report.weights if weight.head] == ["head.weight"]
    assert [weight.name for weight in report.weights if weight.fp8] == ["out.weight"]


def test_layers_of_blocks_are_no_heads_whatever_their_names_and_sizes():
    block = lambda: nn.ModuleDict({"up": nn.Linear(32, 64), "output": nn.Linear(64, 32)})  # noqa: E731
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "blocks": nn.ModuleList([block(), block()])})
    report = f8.float8_report(f8.convert_to_float8_training(model))
    assert not [weight.name for weight in report.weights if weight.head]
    assert sum(weight.fp8 for weight in report.weights) == 4


def test_a_model_whose_only_layer_is_a_tied_head_says_how_to_convert_it():
    model = Decoder(tied=True)
    del model.hidden
    with pytest.raises(Fp8Error, match=r"whose weight is an embedding's \(heads=True converts it\) \(lm_head\)"):
        f8.convert_to_float8_training(model)


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_one_visible_line_on_rank_0_says_what_was_converted(rank, lines, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "get_node_local_rank", lambda fallback_rank=0: rank)
    with caplog.at_level(logging.WARNING):
        f8.convert_to_float8_training(nn.Linear(32, 32))  # a layer alone is converted without a line
        f8.convert_to_float8_training(Decoder(tied=True))
    assert len(caplog.messages) == lines
    head = "Output head lm_head: high-precision matmul, weight shared with embedding"
    for words in ("1 linear layers. ", "Left: ", "% of the weights converted", head):
        assert (words in caplog.text) == bool(lines)


def test_a_second_conversion_of_the_same_recipe_does_nothing_and_of_another_one_raises(caplog):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipe="rowwise")
    weights = list(model.parameters())
    caplog.clear()
    assert f8.convert_to_float8_training(model, recipe="rowwise") is model
    assert [a is b for a, b in zip(weights, model.parameters(), strict=True)] == [True] * 4
    assert "2 layers are FP8 layers of this recipe already" in caplog.text
    with pytest.raises(Fp8Error, match="2 are FP8 layers of another recipe already: unconvert"):
        f8.convert_to_float8_training(model, recipe="tensorwise")


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        (["rowwise"], {}, r"convert_to_float8_training\(model, recipe='rowwise'\)"),
        ([f8.Float8TrainingConfig()], {}, "Name the others: config=, recipe="),
        ([], {"recipe_name": "rowwise"}, "no argument 'recipe_name'. Write recipe='rowwise'"),
        ([], {"enable": True}, "no argument 'enable'. It takes config, recipe"),
    ],
)
def test_arguments_without_a_name_or_with_another_one_are_told_the_right_one(arguments, options, told):
    with pytest.raises(Fp8Error, match=told):
        f8.convert_to_float8_training(nn.Linear(32, 32), *arguments, **options)


def test_before_fully_shard_the_report_says_what_would_be_gathered():
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert "would be gathered in FP8 once sharded with fully_shard." in f8.float8_report(model).headline


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"])
def test_the_filter_by_size_leaves_out_what_was_slower_on_a_gpu(recipe):
    """4096 -> 1024 took 3 to 10 times as long as in bfloat16 on an H100, in every recipe."""
    keep = f8.auto_filter_for_recipe(recipe)
    with torch.device("meta"):
        sizes = [(4096, 1024), (1024, 4096), (4096, 4096), (4096, 14336), (4096, 14328)]
        kept = [keep(nn.Linear(*size), "layer") for size in sizes]
    assert kept == [False, False, True, True, False]


def test_layers_without_a_weight_yet_are_no_obstacle():
    low = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(8)), module_filter_fn=["0"])
    assert isinstance(low[0], f8.Float8Linear)
    assert f8.float8_report(low).bytes == (16 * 16 + 16) * 2


class Corrected(nn.Module):
    """A layer with an adapter of rank 4, named as PEFT and torchtitan name theirs."""

    def __init__(self, first, second):
        super().__init__()
        self.base_layer = nn.Linear(32, 48)
        self.add_module(first, nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)}))
        self.add_module(second, nn.ModuleDict({"default": nn.Linear(4, 48, bias=False)}))


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("lora_a", "lora_b")])
def test_adapters_stay_wide_whatever_the_filter_says(names, caplog):
    caplog.set_level("INFO", "fp8_torch_fsdp")
    model = f8.convert_to_float8_training(nn.Sequential(Corrected(*names)), module_filter_fn=lambda layer, name: True)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds == [f8.Float8Linear, nn.Linear, nn.Linear]
    assert "2 an adapter (0.lora_" in caplog.text
    assert [count for _, why, count, _ in f8.float8_report(model).left if why == "adapter"] == [2]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
@pytest.mark.parametrize("made", [False, True])
def test_fp8_of_accelerate_raises(made, precision, monkeypatch):
    """The real one is in tests/ecosystem/test_with_trainers.py."""
    state = SimpleNamespace(
        is_initialized=lambda: made,
        AcceleratorState=lambda: SimpleNamespace(mixed_precision=precision),
        parse_choice_from_env=lambda name: "fp8" if made else precision,  # an Accelerator has the last word
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    model = nn.Sequential(nn.Linear(32, 32))
    if precision != "fp8":
        f8.convert_to_float8_training(model)
        return
    with pytest.raises(Fp8Error, match="accelerate launch --mixed_precision bf16"):
        f8.convert_to_float8_training(model)
    assert type(model[0]) is nn.Linear


def test_a_layer_that_another_library_replaced_is_reported():
    """As torchao's conversion does: another module takes the parameters of a linear layer."""

    class Other(nn.Linear):
        pass

    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)))
    other = Other(32, 64)
    other.weight, other.bias, model[0] = model[0].weight, model[0].bias, other
    replaced, _, kept, _ = f8.float8_report(model).weights
    assert (replaced.fp8, kept.fp8) == (False, True)
    assert replaced.why == f"the FP8 layer was replaced by {__name__}.Other"
    assert f"(1 parameter, {replaced.why})" in f8.float8_report(model).headline
