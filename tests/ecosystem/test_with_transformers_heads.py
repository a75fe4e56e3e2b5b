"""Output heads of Transformers' models: what the reports say is what matmul and all-gather do."""

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def llama(*, tied):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=tied, **SIZES))


def gemma():
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(head_dim=16, num_key_value_heads=4, **SIZES))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=4))


MODELS = {
    "llama": (lambda: llama(tied=False), ""),
    "llama-tied": (lambda: llama(tied=True), "model.embed_tokens"),
    "gemma": (gemma, "model.embed_tokens"),
    "gpt2": (gpt2, "transformer.wte"),
}


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("build", "shared_with"), MODELS.values(), ids=MODELS)
def test_reports_say_what_the_head_does(build, shared_with, heads):
    model = f8.convert_to_float8_training(build().to(torch.bfloat16), heads=heads)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    in_fp8 = not torch.equal(model.lm_head(x), nn.functional.linear(x, plain(model.lm_head.weight)))
    assert in_fp8 == (heads or not shared_with)
    assert (type(model.lm_head) is nn.Linear) == (not in_fp8)
    (weight,) = [weight for weight in f8.float8_report(model).weights if weight.head]
    assert (weight.name, weight.fp8) == (f"{shared_with or 'lm_head'}.weight", in_fp8)
    assert weight.head.startswith("Output head lm_head: ")
    assert (f"shared with {shared_with}" in weight.head) == bool(shared_with)
    assert (weight.wire == "float8_e4m3fn") == (not shared_with)


def plain(weight):
    return weight.plain if isinstance(weight, f8.ShardedFloat8Weight) else weight
