"""Experts of Transformers and of torchtitan: their forwards with FP8 products, and shares at real size."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: `nox -s ecosystem` does it")

import fp8_torch_fsdp as f8
from tests.ecosystem.architectures import ARCHITECTURES, MIXTURES, report

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SIZES = {
    "Mixtral 8x7B": SMALL | {"num_local_experts": 4},
    "Qwen3-MoE 30B": SMALL | {"num_experts": 4, "moe_intermediate_size": 48},
    "GPT-OSS 120B": SMALL | {"num_local_experts": 4},
    "DeepSeek-V3": {name: size for name, size in SMALL.items() if name != "head_dim"} | RANKS | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def small(name):
    model, config, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**SIZES[name])).float().eval()


def wide_product(experts, name, rows, offsets):
    """Return what `grouped_product` approximates."""
    weight = getattr(experts, name).plain
    weight = weight if experts.fp8_layout.transposed else weight.mT
    parts = torch.split(rows, offsets.diff(prepend=offsets.new_zeros(1)).tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("name", MIXTURES)
def test_the_forward_is_that_of_the_experts(monkeypatch, name):
    model, tokens = small(name), torch.arange(18).view(2, 9)
    with torch.no_grad():
        wanted = model(tokens).logits
        f8.convert_to_float8_training(model, module_filter_fn=["*.experts"])
        low = model(tokens).logits
        monkeypatch.setattr(f8.Float8Experts, "grouped_product", wide_product)
        torch.testing.assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    assert 0 < float((low - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_learns_and_routers_stay_wide(name):
    model = f8.convert_to_float8_training(small(name))
    model(torch.arange(64).view(2, 32)).logits.square().mean().backward()
    experts = [(n, module) for n, module in model.named_modules() if isinstance(module, f8.Float8Experts)]
    assert experts
    for _, module in experts:
        grads = [getattr(module, weight).grad for weight in module.fp8]
        assert all(bool(grad.isfinite().all() and grad.any()) for grad in grads)
    assert sum(one.why == "router" for one in f8.float8_report(model).weights) == len(experts)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_converted_at_their_real_size(name):
    found = report(name)
    assert found.converted >= 0.97
    assert found.gathered >= 0.97


def test_gpt2_is_converted():
    found = report("GPT-2")
    assert {one.class_name for one in found.weights if one.fp8} == {"Conv1D"}
    assert found.converted > 0.65  # most of the rest are embeddings


def test_experts_of_torchtitan(monkeypatch):
    moe = pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is missing", exc_type=ImportError)
    experts = moe.GroupedExperts(moe.GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=3))
    with torch.no_grad():
        for weight in experts.parameters():
            nn.init.normal_(weight, std=0.2)
    x, counts = torch.randn(32, 32).bfloat16(), torch.tensor([16, 0, 16])
    with torch.no_grad():
        wanted = experts(x, counts).float()
        low = f8.convert_to_float8_training(nn.Sequential(experts))[0]
        assert isinstance(low, moe.GroupedExperts)
        assert isinstance(low, f8.Float8Experts)
        found = low(x, counts).float()
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.1
