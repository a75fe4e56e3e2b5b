"""Models of Transformers: heads, experts, its own tensor parallelism, and FP8 primary weights saved and loaded."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers", reason="Transformers is not installed: `nox -s ecosystem` does it")
pytest.importorskip("diffusers", reason="diffusers is not installed: `nox -s ecosystem` does it")

import fp8_te_init as fti
import fp8_torch_fsdp as f8
from benchmarks._architectures import MIXTURES, report, small
from tests.ecosystem.small import llama, loaded, train
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

# ---------------------------------------------------------------- heads: reports say what matmul and all-gather do

HEADS = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 1, "n_head": 4}
MODELS = {
    "llama": (lambda: llama(**HEADS), ""),
    "llama-tied": (lambda: llama(**HEADS, tie_word_embeddings=True), "model.embed_tokens"),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), "transformer.wte"),
}


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("build", "shared_with"), MODELS.values(), ids=MODELS)
def test_reports_say_what_the_head_does(build, shared_with, heads):
    model = f8.convert_to_float8_training(build().to(torch.bfloat16), heads=heads)
    x, head = torch.randn(32, 64, dtype=torch.bfloat16), model.lm_head.weight
    wide = head.plain if isinstance(head, f8.ShardedFloat8Weight) else head
    in_fp8 = not torch.equal(model.lm_head(x), nn.functional.linear(x, wide))
    assert in_fp8 == heads
    assert (type(model.lm_head) is nn.Linear) == (not in_fp8)
    (weight,) = [weight for weight in f8.float8_report(model).weights if weight.head]
    assert (weight.name, weight.fp8) == (f"{shared_with or 'lm_head'}.weight", in_fp8)
    assert weight.head.startswith("Output head lm_head: ")
    assert (f"shared with {shared_with}" in weight.head) == bool(shared_with)
    assert (weight.wire == "float8_e4m3fn") == (heads and not shared_with)


# ---------------------------------------------------------------- experts, and shares at real size


def matmul_in_high_precision(experts, name, rows, weight, offsets):
    """Return what `fp8_matmul` approximates."""
    weight = weight.plain if experts.fp8_layout.transposed else weight.plain.mT
    parts = torch.split(rows, offsets.diff(prepend=offsets.new_zeros(1)).tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def is_near(low, wanted):
    return 0 < float((low - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("name", MIXTURES)
def test_the_forward_is_that_of_the_experts(monkeypatch, name):
    model, tokens = small(name).eval(), torch.arange(18).view(2, 9)
    with torch.no_grad():
        wanted = model(tokens).logits
        f8.convert_to_float8_training(model, module_filter_fn=["*.experts"])
        assert is_near(model(tokens).logits, wanted)
        monkeypatch.setattr(f8.Float8Experts, "fp8_matmul", matmul_in_high_precision)
        torch.testing.assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_learns_and_routers_stay_wide(name):
    model = f8.convert_to_float8_training(small(name).eval())
    model(torch.arange(64).view(2, 32)).logits.square().mean().backward()
    experts = [module for module in model.modules() if isinstance(module, f8.Float8Experts)]
    grads = [getattr(module, weight).grad for module in experts for weight in module.fp8]
    assert grads
    assert all(bool(grad.isfinite().all() and grad.any()) for grad in grads)
    assert sum(one.why == "router" for one in f8.float8_report(model).weights) == len(experts)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_converted_at_their_real_size(name):
    found = report(name)
    assert min(found.converted, found.gathered) >= 0.97


def test_gpt2_is_converted():
    found = report("GPT-2")
    assert {one.class_name for one in found.weights if one.fp8} == {"Conv1D"}
    assert found.converted > 0.65  # most of the rest are embeddings


def test_experts_of_torchtitan():
    moe = pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is missing", exc_type=ImportError)
    experts = moe.GroupedExperts(moe.GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=3))
    x, counts = torch.randn(32, 32).bfloat16(), torch.tensor([16, 0, 16])
    with torch.no_grad():
        for weight in experts.parameters():
            nn.init.normal_(weight, std=0.2)
        wanted = experts(x, counts).float()
        low = f8.convert_to_float8_training(nn.Sequential(experts))[0]
        assert isinstance(low, moe.GroupedExperts)
        assert isinstance(low, f8.Float8Experts)
        assert is_near(low(x, counts).float(), wanted)


# ---------------------------------------------------------------- tensor parallelism of `from_pretrained`


def distributed(rank, world_size, folder, recipe):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    tokens, losses = (torch.arange(64).view(4, 16) * 3) % 64, []
    for plan in ("auto", None):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan=plan, dtype=torch.float32).train()
        before = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
        f8.convert_to_float8_training(model, recipe=recipe, module_filter_fn=lambda layer, name: "lm_head" not in name)
        after = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
        if plan:
            assert before == after
            assert len(before) >= 14
            layers = [layer for layer in model.modules() if isinstance(layer, f8.Float8Linear)]
            assert {type(layer.fp8_strategy).__name__ for layer in layers} == {"Colwise", "Rowwise"}
        losses.append(train(model, lambda model: model(input_ids=tokens, labels=tokens).loss, steps=4))
    return losses


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_a_tp_plan_keeps_its_placements_and_trains_like_one_process(run_ranks, tmp_path, recipe):
    llama(num_hidden_layers=2).save_pretrained(tmp_path)
    for losses, alone in run_ranks(2, distributed, str(tmp_path), recipe, timeout=800):
        assert losses == pytest.approx(alone, rel=2e-2)
        assert losses[-1] < losses[0]


# ---------------------------------------------------------------- expert parallelism of `from_pretrained`


def expert_parallel(rank, world_size, folder):
    """Return losses and bytes of all-to-alls under Transformers' own implementation, and under ours."""
    from transformers.distributed import DistributedConfig

    from fp8_torch_fsdp.integrations.transformers_experts import register_fp8_dispatch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    register_fp8_dispatch()
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(rank))
    found = []
    for name in ("all_to_all", "fp8"):
        config = DistributedConfig(ep_size=2, fsdp_size=world_size, ep_implementation=name)
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config, dtype="bfloat16")
        with CollectiveCounter() as counter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        grads = [p.grad.full_tensor() for name, p in model.named_parameters() if "experts" in name]
        model.zero_grad()
        sent = [one for one in counter.seen if "alltoall" in one.kind or "all_to_all" in one.kind]
        sizes = torch.tensor([one.nbytes for one in sent if one.elements > 1000])
        torch.distributed.all_reduce(sizes)
        experts = sum(isinstance(module, f8.Float8Experts) for module in model.modules())
        losses = train(model.train(), lambda model: model(input_ids=tokens, labels=tokens).loss, steps=4)
        found.append((losses, sizes, experts, grads))
    return found


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_ep_plan_sends_codes_to_fp8_experts(run_ranks, tmp_path, world_size):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="Transformers has no implementations")
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    results = run_ranks(world_size, expert_parallel, str(tmp_path), timeout=800)
    for (losses, plain, none, grads), (low, codes, experts, low_grads) in results:
        assert (none, experts, len(grads)) == (0, 1, 2)
        assert low[0] == pytest.approx(losses[0], rel=1e-3)
        assert all(is_near(*pair) for pair in zip(low_grads, grads, strict=True))
        assert low[-1] < low[0]
        assert codes.shape == plain.shape == (4,)
        assert (codes[::2] <= 0.52 * plain[::2]).all(), (codes, plain)
        assert codes.sum() <= 0.76 * plain.sum()


# ---------------------------------------------------------------- FP8 primary weights: values travel, codes come again

primary_recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])


def primary(recipe, **options):
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return llama(**options)


def codes_of(model):
    return [weight for weight in model.parameters() if isinstance(weight, fti.PrimaryFloat8Weight)]


def values_of(model):
    weights = model.named_parameters()
    return {name: w.dequantize() if isinstance(w, fti.PrimaryFloat8Weight) else w.detach() for name, w in weights}


@pytest.mark.parametrize("tied", [False, True])
@primary_recipes
def test_saved_values_are_the_weights_of_a_plain_model_and_become_codes_again(tmp_path, recipe, tied):
    model = primary(recipe, tie_word_embeddings=tied)
    wanted = values_of(model)
    model.save_pretrained(tmp_path, state_dict=fti.export_fp32_state_dict(model))
    plain = loaded(tmp_path)
    assert not codes_of(plain)
    assert all(torch.equal(weight, wanted[name]) for name, weight in plain.named_parameters())
    again = fti.convert_linear(plain, recipe=recipe)
    assert len(codes_of(again)) == 8 - tied
    # a scale of values that were rounded once can be its neighbour, or twice as large where it is a power of two
    found = values_of(again)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-6, atol=0) for name in wanted)


@primary_recipes
def test_loading_inside_primary_weights_is_converting_what_was_loaded(tmp_path, recipe):
    llama().save_pretrained(tmp_path)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = loaded(tmp_path)
    expected, found = values_of(fti.convert_linear(loaded(tmp_path), recipe=recipe)), values_of(model)
    assert len(codes_of(model)) == 8
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # the values before rounding are kept for masters, exactly
    name = "model.layers.0.mlp.up_proj.weight"
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=1.0)
    fti.seed_masters(optimizer, model)
    assert torch.equal(optimizer.master_of(model.get_parameter(name)), loaded(tmp_path).get_parameter(name))


def test_state_dicts_that_others_ask_for_hold_codes_as_before():
    state = primary("tensorwise").state_dict()
    assert state["lm_head.weight"].dtype == torch.uint8
    assert "lm_head.weight_scale_e4m3" in state
