"""Transformers' save_pretrained and from_pretrained with FP8 primary weights: values travel, and become codes again."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: `nox -s ecosystem` does it")

import fp8_te_init as fti

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
Llama = transformers.LlamaForCausalLM


def primary(recipe, **options):
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return Llama(transformers.LlamaConfig(**SIZES | options))


def values_of(model):
    weights = model.named_parameters()
    return {name: w.dequantize() if isinstance(w, fti.PrimaryFloat8Weight) else w.detach() for name, w in weights}


def loaded(folder):
    """Return what Transformers loads, all of whose keys must fit."""
    model, info = Llama.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert [info[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys") if info[kind]] == []
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_saved_values_are_the_weights_of_a_plain_model_and_become_codes_again(tmp_path, recipe, tied):
    model = primary(recipe, tie_word_embeddings=tied)
    wanted = values_of(model)
    model.save_pretrained(tmp_path, state_dict=fti.export_fp32_state_dict(model))
    plain = loaded(tmp_path)
    assert not any(isinstance(w, fti.PrimaryFloat8Weight) for w in plain.parameters())
    assert all(torch.equal(weight, wanted[name]) for name, weight in plain.named_parameters())
    again = fti.convert_linear(plain, recipe=recipe)
    found = values_of(again)
    assert sum(isinstance(w, fti.PrimaryFloat8Weight) for w in again.parameters()) == 8
    # a scale of values that were rounded once can be its neighbour, or twice as large where it is a power of two
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-6, atol=0) for name in wanted)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_loading_inside_primary_weights_is_converting_what_was_loaded(tmp_path, recipe):
    torch.manual_seed(1)
    Llama(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = loaded(tmp_path)
    after = fti.convert_linear(Llama.from_pretrained(tmp_path, dtype=torch.float32), recipe=recipe)
    expected, found = values_of(after), values_of(model)
    assert sum(isinstance(w, fti.PrimaryFloat8Weight) for w in model.parameters()) == 8
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # the values before rounding are kept for masters, exactly
    name, weight = "model.layers.0.mlp.up_proj.weight", model.model.layers[0].mlp.up_proj.weight
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=1.0)
    fti.seed_masters(optimizer, model)
    assert torch.equal(optimizer.master_of(weight), loaded(tmp_path).get_parameter(name))


def test_state_dicts_that_others_ask_for_hold_codes_as_before():
    state = primary("tensorwise").state_dict()
    assert state["lm_head.weight"].dtype == torch.uint8
    assert "lm_head.weight_scale_e4m3" in state
