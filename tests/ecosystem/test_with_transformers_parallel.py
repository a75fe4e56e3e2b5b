"""Transformers' own tensor parallelism: models that `from_pretrained` has distributed are converted as they lie."""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: `nox -s ecosystem` does it")

import fp8_torch_fsdp as f8
from tests.helpers.ranks import RankPool

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.distributed]

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def without_head(layer, name):
    return "lm_head" not in name


def trained(model):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    tokens = (torch.arange(64).view(4, 16) * 3) % 64
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    return losses


def distributed(rank, world_size, folder, recipe):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    model = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).train()
    before = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    f8.convert_to_float8_training(model, recipe=recipe, module_filter_fn=without_head)
    after = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    layers = {type(layer.distribution).__name__ for layer in model.modules() if isinstance(layer, f8.Float8Linear)}
    whole = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    f8.convert_to_float8_training(whole, recipe=recipe, module_filter_fn=without_head)
    return before == after, len(before), layers, trained(model), trained(whole)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_a_tp_plan_keeps_its_placements_and_trains_like_one_process(tmp_path, recipe):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    pool = RankPool(2, collective_timeout=600)
    try:
        for same, count, kinds, losses, alone in pool.run(distributed, str(tmp_path), recipe, timeout=800):
            assert same
            assert count >= 14
            assert kinds == {"Colwise", "Rowwise"}
            assert losses == pytest.approx(alone, rel=2e-2)
            assert losses[-1] < losses[0]
    finally:
        pool.close()
