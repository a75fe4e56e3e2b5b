"""Output heads: what report and log say of them is what their matmul and their weight's all-gather do."""

import logging

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error


class Decoder(nn.Module):
    """Embedding, positions, one hidden layer and a head: the form of GPT-2 and Llama."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(96, 32), nn.Embedding(32, 32)
        self.hidden, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 96, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight


def report_of(model):
    """Return what the report says of the weight of the only head."""
    (weight,) = [weight for weight in f8.float8_report(model).weights if weight.head]
    assert weight.head in f8.float8_report(model).headline
    return weight


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_head_that_is_an_embedding_too_stays_in_high_precision(recipe):
    model = Decoder(tied=True).to(torch.bfloat16)
    f8.convert_to_float8_training(model, recipe=recipe)
    assert type(model.lm_head) is nn.Linear
    x = torch.randn(8, model.lm_head.in_features, dtype=torch.bfloat16)
    assert torch.equal(model.lm_head(x), torch.nn.functional.linear(x, model.lm_head.weight))
    weight = report_of(model)
    assert (weight.name, weight.fp8, weight.wire) == ("embedding.weight", False, "bfloat16")
    assert weight.head == (
        "Output head lm_head: high-precision matmul, weight shared with embedding, gathered in high precision."
    )


def test_a_tied_head_that_is_asked_for_computes_in_fp8_and_travels_in_high_precision():
    model = f8.convert_to_float8_training(Decoder(tied=True), heads=True)
    assert isinstance(model.lm_head, f8.Float8Linear)
    assert "all_gather=high precision" in repr(model.lm_head)
    x = torch.randn(32, model.lm_head.in_features)
    assert not torch.equal(model.lm_head(x), torch.nn.functional.linear(x, model.lm_head.weight))
    weight = report_of(model)
    assert weight.head == "Output head lm_head: FP8 matmul, weight shared with embedding, gathered in high precision."
    assert weight.wire == "bfloat16"
    embeddings = [one for one in f8.float8_report(model).weights if one.class_name == "Embedding"]
    # the head's weight counts as computed in FP8, the positions do not
    assert [(one.name, one.fp8) for one in embeddings] == [("embedding.weight", True), ("positions.weight", False)]


def test_a_head_with_a_weight_of_its_own_is_converted_and_named():
    model = f8.convert_to_float8_training(Decoder(tied=False))
    assert isinstance(model.lm_head, f8.Float8Linear)
    weight = report_of(model)
    assert (weight.name, weight.fp8, weight.wire) == ("lm_head.weight", True, "float8_e4m3fn")
    assert "Output head lm_head: FP8 matmul, weight gathered in FP8." in str(f8.float8_report(model))


def test_a_head_that_the_filter_leaves_is_named():
    model = f8.convert_to_float8_training(Decoder(tied=False), module_filter_fn=lambda layer, name: name != "lm_head")
    assert report_of(model).head == "Output head lm_head: high-precision matmul, weight gathered in high precision."


def test_the_filter_has_the_last_word_on_heads():
    model = Decoder(tied=True)
    f8.convert_to_float8_training(model, heads=True, module_filter_fn=lambda layer, name: name != "lm_head")
    assert type(model.lm_head) is nn.Linear


def test_a_model_whose_only_layer_is_a_tied_head_says_how_to_convert_it():
    model = Decoder(tied=True)
    del model.hidden
    with pytest.raises(Fp8Error, match=r"whose weight is an embedding's \(heads=True converts it\) \(lm_head\)"):
        f8.convert_to_float8_training(model)


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_one_visible_line_on_rank_0_says_what_was_converted(rank, lines, monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "get_node_local_rank", lambda fallback_rank=0: rank)
    with caplog.at_level(logging.WARNING):
        f8.convert_to_float8_training(Decoder(tied=True))
    assert len(caplog.messages) == lines
    if lines:
        assert "1 linear layers. " in caplog.text
        assert "Left: " in caplog.text
        assert "% of the weights converted" in caplog.text
        assert "Output head lm_head: high-precision matmul, weight shared with embedding" in caplog.text


def test_a_layer_alone_is_converted_without_a_line(caplog):
    with caplog.at_level(logging.WARNING):
        f8.convert_to_float8_training(nn.Linear(32, 32))
    assert caplog.messages == []
