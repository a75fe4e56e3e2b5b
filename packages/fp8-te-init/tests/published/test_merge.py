"""Merged adapters of published weights, and the report of what a merge would keep."""

import pytest
import torch

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init.published import (
    load_published,
    merge_adapter,
    merge_report,
    save_published,
)
from fp8_te_init.published.weight import published_of
from published_files import ODD, tensors_of, write
from published_models import ALL, Llama, adapt, batch, draw_adapters
from tests.helpers.tensors import same

LAYER = "model.layers.0.self_attn.q_proj"


def loaded(folder, config=ODD):
    model = Llama(config)
    load_published(model, folder)
    return model


def with_delta(folder, size):
    """Return a model with adapters whose deltas have this share of the weights' norms."""
    model = draw_adapters(adapt(loaded(folder), ALL, rank=16, dtype=torch.float32))
    for layer in model.modules():
        if hasattr(layer, "lora_B"):
            factor = (
                size * layer.base_layer.weight.dequantize().float().norm() / layer.get_delta_weight("default").norm()
            )
            layer.lora_B["default"].weight.data.mul_(factor)
    return model


@pytest.mark.parametrize(
    ("size", "share", "error", "advice"),
    [
        (1e-3, (0.02, 0.08), (0.95, 1.0), "apart"),
        (1e-2, (0.3, 0.5), (0.8, 0.9), "bfloat16"),
        (3e-2, (0.7, 0.9), (0.5, 0.7), "bfloat16"),
    ],
)
def test_the_report_says_how_little_of_an_adapter_arrives_in_codes(tmp_path, size, share, error, advice):
    model = with_delta(write(tmp_path), size)
    before = {
        name: weight.codes.clone() for name, p in model.named_parameters() if (weight := published_of(p)) is not None
    }
    report = merge_report(model)
    assert len(report) == 14
    for one in report:
        assert one.size == pytest.approx(size, rel=0.01)
        assert share[0] < one.share < share[1]
        assert error[0] < one.error < error[1]
        assert one.copy_error < one.error or size == 1e-3
        assert one.advice == advice
    assert f"{LAYER}" in str(report)
    assert all(same(published_of(model.get_parameter(name)).codes, codes) for name, codes in before.items())


def test_a_merge_is_what_the_report_said_and_codes_are_saved(tmp_path):
    folder = write(tmp_path / "in")
    model = with_delta(folder, 3e-2)
    (one, *_) = merge_report(model)
    layer = model.get_submodule(one.name)
    old, delta = layer.base_layer.weight.dequantize().float(), layer.get_delta_weight("default").detach()
    wanted = model(batch(0)).detach()
    merge_adapter(model, [one.name], into="codes")
    arrived = layer.base_layer.weight.dequantize().float() - old
    assert float((arrived - delta).norm() / delta.norm()) == pytest.approx(one.error, abs=0.1)
    assert not layer.get_delta_weight("default").any()
    save_published(model, tmp_path / "out", folder)
    tensors, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert {name for name in tensors if not same(tensors[name], before[name])} == {f"{one.name}.weight"}
    names = [other.name for other in merge_report(model) if other.name != one.name]
    merge_adapter(model, names, into="bfloat16")
    assert published_of(model.get_submodule(names[0]).base_layer.weight) is None
    assert model.get_submodule(names[0]).base_layer.weight.dtype == torch.bfloat16
    got = model(batch(0)).detach()
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    assert not any(f"{name}.base_layer.weight_scale_inv" in model.state_dict() for name in names)


def test_what_cannot_be_merged_is_an_error(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(Fp8Error, match="no adapter 'default' on a published weight"):
        merge_report(loaded(folder))
    model = with_delta(folder, 1e-2)
    with pytest.raises(Fp8Error, match="No adapter 'default' on published weights at lm_head"):
        merge_adapter(model, ["lm_head"], into="codes")
    with pytest.raises(Fp8Error, match='into must be "bfloat16" or "codes"'):
        merge_adapter(model, [LAYER], into="float32")
    dora = adapt(loaded(folder), ("q_proj",), magnitude=True)
    with pytest.raises(Fp8UnsupportedError, match=rf"{LAYER} has DoRA"):
        merge_report(dora)
