"""Transformers' save_pretrained and from_pretrained with FP8 primary weights: values travel, codes are refused."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: `nox -s ecosystem` does it")

import fp8_te_init as fti
from fp8_common import Fp8Error

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
Llama = transformers.LlamaForCausalLM


def primary(recipe):
    torch.manual_seed(0)
    with fti.primary_weights(recipe):
        return Llama(transformers.LlamaConfig(**SIZES))


def values_of(model):
    """Return what a plain model would hold, as the guide does it."""
    weights = model.named_parameters()
    return {name: w.dequantize() if isinstance(w, fti.PrimaryFloat8Weight) else w.detach() for name, w in weights}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_saved_values_are_the_weights_of_a_plain_model_and_become_codes_again(tmp_path, recipe):
    model = primary(recipe)
    model.save_pretrained(tmp_path, state_dict=values_of(model))
    plain, info = Llama.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert [info[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys") if info[kind]] == []
    wanted = values_of(model)
    assert all(torch.equal(weight, wanted[name]) for name, weight in plain.named_parameters())
    again = fti.convert_linear(plain, recipe=recipe)
    found = values_of(again)
    assert sum(isinstance(w, fti.PrimaryFloat8Weight) for w in again.parameters()) == 8
    # a scale of values that were rounded once can be its neighbour, or twice as large where it is a power of two
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-6, atol=0) for name in wanted)


def test_loading_inside_primary_weights_is_refused_and_takes_no_codes_for_values(tmp_path):
    model = primary("tensorwise")
    model.save_pretrained(tmp_path)
    with fti.primary_weights(), pytest.raises(Fp8Error, match="codes are made of float32, bfloat16 or float16"):
        Llama.from_pretrained(tmp_path)
