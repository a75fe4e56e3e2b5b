"""PEFT: low-rank adapters beside FP8 layers stay in high precision, and are merged into FP8 weights."""

import pytest
import torch
from torch import nn

REASON = "PEFT and Transformers are not installed: `nox -s ecosystem` installs them"
peft = pytest.importorskip("peft", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

import fp8_torch_fsdp as f8
from tests.ecosystem.small import llama, train

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

TOKENS = torch.arange(32).view(2, 16)


def with_adapters(recipe, convert_first):
    model, settings = llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"])
    if convert_first:
        f8.convert_to_float8_training(model, recipe=recipe)
    model = peft.get_peft_model(model, settings)
    return model if convert_first else f8.convert_to_float8_training(model, recipe=recipe)


@pytest.mark.parametrize("convert_first", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_adapters_stay_wide_and_are_merged_safely(recipe, convert_first):
    model = with_adapters(recipe, convert_first)
    train(model, lambda model: model(input_ids=TOKENS, labels=TOKENS).loss)
    model.eval()
    wide = {type(m) for name, m in model.named_modules() if ".lora_" in name and isinstance(m, nn.Linear)}
    assert wide == {nn.Linear}
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer.base_layer, f8.Float8Linear)
    merged = layer.base_layer.weight.detach().clone().as_subclass(torch.Tensor) + layer.get_delta_weight("default")
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        whole = model.merge_and_unload(safe_merge=True)
        after = whole(input_ids=TOKENS).logits
    own = whole.model.layers[0].self_attn.q_proj
    assert isinstance(own, f8.Float8Linear)
    assert torch.equal(own.weight, merged)
    assert 0 < float((after - before).norm() / before.norm()) < 0.1, "what was added is now rounded with the weight"
    if recipe != "tensorwise_delayed":
        assert set(whole.state_dict()) == set(llama().state_dict())


def test_the_report_names_adapters():
    report = f8.float8_report(with_adapters("tensorwise", convert_first=False))
    assert sum(one.why == "adapter" for one in report.weights) == 6
