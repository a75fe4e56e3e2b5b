"""An independent reader: Transformers loads exports by their config alone, and gives the logits of our FP8 forward.

Its own quantized loading runs on a CPU: compressed-tensors layouts with the rounding of activations that the config
asks for, every layout dequantized. What runs in FP8 kernels needs a GPU and is not run here.
"""

import dataclasses
import json

import pytest
import torch

import fp8_te_init as fti
import fp8_torch_fsdp as f8
from fp8_common import CANONICAL, get_recipe, read_for_serving

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,  # Transformers 5.23 reads and computes with whole blocks of 128 alone
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def recipe_of(name):
    """Return a recipe; "rowwise, exact" is the row-wise one whose scales are not rounded to powers of two."""
    if name != "rowwise, exact":
        return get_recipe(name)
    casts = {kind: dataclasses.replace(getattr(get_recipe("rowwise"), kind), policy=CANONICAL) for kind in OPERANDS}
    return dataclasses.replace(get_recipe("rowwise"), name="exact", **casts)


OPERANDS = ("input", "weight", "grad_output")


def windows(seed):
    return torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(seed))


def trained(plugin, name, chosen=lambda name: True):
    """Return a small Llama after three steps, and what exports it."""
    recipe = recipe_of(name)
    if plugin == "fp8-te-init":
        model = fti.convert_linear(
            llama(), module_filter_fn=lambda layer, name: chosen(name), recipe=recipe, preserve="cpu"
        )
        optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        fti.seed_masters(optimizer, model, strict=False)
    else:
        model = f8.convert_to_float8_training(llama(), module_filter_fn=lambda layer, name: chosen(name), recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = windows(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def export(folder, layout, codes="training"):
        given = {"layout": layout, "codes": codes, "config": model.config.to_dict()}
        if plugin == "fp8-te-init":
            fti.export_for_serving(model, optimizer, folder, **given)
        else:
            f8.export_for_serving(model, folder, **given)

    return model, export


def loaded(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def logits(model):
    with torch.no_grad():
        return model(input_ids=windows(99)).logits


def apart(one, other):
    return ((one - other).norm() / other.norm()).item()


def decoded(folder):
    """Return the logits of a plain model with the values that `read_for_serving` decodes."""
    plain, read = llama(), read_for_serving(folder)
    plain.load_state_dict({name: torch.from_numpy(read[name].values().copy()) for name in read})
    return logits(plain)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise, exact", "blockwise"])
@pytest.mark.parametrize("plugin", ["fp8-te-init", "fp8-torch-fsdp"])
def test_an_exported_model_computes_our_fp8_forward(tmp_path, plugin, name):
    """Weights are the same; activations are rounded by `x / (amax / 448)`, where ours are by `x * (448 / amax)`.

    So the last bits of float32 differ, and the codes of activations that lie beside a midpoint, and then what follows
    from them: each layer alone is compared more closely. Without the rounding of activations both are much further
    apart.
    """
    model, export = trained(plugin, name)
    export(tmp_path / "out", "compressed-tensors")
    theirs, inputs = loaded(tmp_path / "out"), {}
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn, "not dequantized by the loader"
    for key, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, x, key=key: inputs.update({key: x[0]}))
    ours = logits(model)
    assert apart(logits(theirs), ours) < 2**-6
    assert apart(decoded(tmp_path / "out"), ours) > 2**-5
    assert len(inputs) == 15
    with torch.no_grad():
        for key, x in list(inputs.items()):
            layer, expected = theirs.get_submodule(key), model.get_submodule(key)(x)
            assert apart(layer(x), expected) < 2**-9, key
            assert apart(torch.nn.functional.linear(x, layer.weight), expected) > 2**-6, key


def test_the_row_wise_recipe_rounds_activations_otherwise(tmp_path):
    """No layout can say that scales of activations are powers of two."""
    model, export = trained("fp8-te-init", "rowwise")
    export(tmp_path / "out", "compressed-tensors")
    assert 2**-5 < apart(logits(loaded(tmp_path / "out")), logits(model)) < 2**-3


@pytest.mark.parametrize(
    ("plugin", "name", "layout", "codes"),
    [
        ("fp8-te-init", "rowwise", "compressed-tensors", "training"),
        ("fp8-te-init", "blockwise", "compressed-tensors", "masters"),
        ("fp8-te-init", "blockwise", "deepseek", "training"),
        ("fp8-te-init", "tensorwise", "deepseek", "masters"),
        ("fp8-te-init", "rowwise", "mx", "masters"),
        ("fp8-torch-fsdp", "blockwise", "deepseek", "training"),
        ("fp8-torch-fsdp", "rowwise", "mx", "masters"),
    ],
)
def test_dequantized_weights_are_our_values_in_every_bit(tmp_path, plugin, name, layout, codes):
    _, export = trained(plugin, name)
    export(tmp_path / "out", layout, codes)
    config = transformers.FineGrainedFP8Config if layout == "deepseek" else transformers.CompressedTensorsConfig
    theirs, read = (
        loaded(tmp_path / "out", quantization_config=config(dequantize=True)),
        read_for_serving(tmp_path / "out"),
    )
    for key, tensor in theirs.state_dict().items():
        assert tensor.numpy().tobytes() == read[key].values().tobytes(), key
    assert torch.equal(logits(theirs), decoded(tmp_path / "out"))


def test_layers_that_stay_in_high_precision_are_named(tmp_path):
    model, export = trained("fp8-te-init", "tensorwise", lambda name: name != "lm_head" and "o_proj" not in name)
    export(tmp_path / "out", "compressed-tensors")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head"]
    theirs = loaded(tmp_path / "out")
    assert theirs.lm_head.weight.dtype == torch.float32
    assert apart(logits(theirs), logits(model)) < 2**-6
