"""Published FP8 checkpoints with the real Transformers and PEFT: adapters beside codes, and the way back."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

REASON = "PEFT and Transformers are not installed: `nox -s ecosystem` installs them"
peft = pytest.importorskip("peft", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from fp8_common import Fp8UnsupportedError
from fp8_te_init.published import PublishedOptimizer, convert_published, load_published, save_published
from fp8_te_init.published.weight import published_of
from published_files import MOE, ODD, tensors_of, values_of, write
from published_models import ALL, ATTENTION, batch, draw_adapters, fill_twin
from tests.helpers import programs
from tests.helpers.repository import ROOT
from tests.helpers.tensors import same, whole

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future


def on_meta(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.__dict__.pop("quantization_config", None)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def with_adapters(folder, targets, *, published, sharded=False, recompute=False, **options):
    """Return a model as the guide builds it, or the same with dequantized weights."""
    model = on_meta(folder)
    if published:
        convert_published(model, folder)
    else:
        rotary = copy.deepcopy(model.model.rotary_emb)
        model.to_empty(device="cpu").model.rotary_emb = rotary
        fill_twin(model, folder)
    # DoRA reads the weight for its magnitudes when it is built, of the twin that has one
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(targets), **options))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if sharded:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    if published:
        load_published(model, folder)
    return draw_adapters(model)


def gradients(model, steps=1):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses, grads = torch.optim.AdamW(trained.values(), lr=1e-3), [], {}
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        grads = grads or {name: whole(p.grad).clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads


OPTIONS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora and a trained head": {"use_rslora": True, "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world", [0, 2])
def test_peft_trains_with_codes_as_with_a_dequantized_model(run_ranks, tmp_path, world, options):
    folder = write(tmp_path)
    if world:
        run_ranks(world, compare, str(folder), ALL, options, True)
    else:
        compare(0, 0, folder, ALL, options, False)


def compare(rank, world, folder, targets, options, sharded):
    results = [
        gradients(with_adapters(folder, targets, published=published, sharded=sharded, **options), 3)
        for published in (True, False)
    ]
    assert results[0][0] == results[1][0]
    assert results[0][1].keys() == results[1][1].keys()
    assert [name for name, grad in results[0][1].items() if not same(grad, results[1][1][name])] == []
    assert len(results[0][1]) >= 28


@pytest.mark.parametrize("world", [0, 2])
def test_peft_trains_with_experts(run_ranks, tmp_path, world):
    folder = write(tmp_path, MOE, "qwen")
    options = {"recompute": True}
    run_ranks(2, compare_moe, str(folder), options) if world else compare_moe(0, 0, folder, options)


def compare_moe(rank, world, folder, options):
    results = [
        gradients(with_adapters(folder, ATTENTION, published=published, sharded=world > 0, **options), 2)
        for published in (True, False)
    ]
    assert results[0][0] == results[1][0]
    assert all(same(grad, results[1][1][name]) for name, grad in results[0][1].items())
    assert len(results[0][1]) == 16


def test_adapters_on_stacks_of_experts_raise_by_name(tmp_path):
    folder = write(tmp_path, MOE, "qwen")
    model = with_adapters(folder, ALL, published=True)
    with pytest.raises(Fp8UnsupportedError, match=r"layers.0.mlp.experts.gate_up_proj was replaced: adapters"):
        model(input_ids=batch(0), labels=batch(0))


def test_peft_does_not_merge_into_codes(tmp_path):
    model = with_adapters(write(tmp_path), ("q_proj",), published=True)
    with pytest.raises(Exception, match="published FP8 weight, whose codes belong to its file"):
        model.merge_and_unload()


def test_a_saved_model_is_what_transformers_loads(tmp_path):
    """On a CPU Transformers dequantizes: its values are those of the codes, where 128 divides the sizes."""
    folder = write(tmp_path / "in", ODD | {"head_dim": 64, "intermediate_size": 384})
    model = on_meta(folder)
    load_published(model, folder)
    save_published(model, tmp_path / "out", folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tensors = tensors_of(folder)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, values_of(tensors, name)), name
    with torch.no_grad():
        assert same(model(input_ids=batch(0)).logits, theirs(input_ids=batch(0)).logits)


@pytest.mark.parametrize("multiply", ["decoded", "fp8"])
@pytest.mark.parametrize("config", [ODD | {"head_dim": 64, "intermediate_size": 384}, MOE], ids=["dense", "experts"])
def test_a_fully_fine_tuned_model_is_saved_as_transformers_loads_it(tmp_path, config, multiply):
    folder = write(tmp_path / "in", config, "qwen")
    model = on_meta(folder)
    load_published(model, folder, multiply=multiply)
    optimizer = PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2)
    for step in range(2):
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_published(model, tmp_path / "out", folder)
    changed, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    coded = {name for name, tensor in before.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(coded) in (14, 38)
    assert not any(same(changed[name], before[name]) for name in coded)
    theirs = on_meta(tmp_path / "out")
    load_published(theirs, tmp_path / "out")
    with torch.no_grad():
        decoded = theirs(input_ids=batch(0)).logits
        assert same(model(input_ids=batch(0)).logits, decoded) == (multiply == "decoded")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        theirs.set_experts_implementation("eager")
        assert torch.equal(theirs(input_ids=batch(0)).logits, decoded)


def test_adapters_are_saved_and_loaded_by_peft_alone(tmp_path):
    folder = write(tmp_path / "in")
    model = with_adapters(folder, ALL, published=True)
    model.save_pretrained(tmp_path / "adapter")
    base = on_meta(folder)
    load_published(base, folder)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        assert same(model(input_ids=batch(0)).logits, again(input_ids=batch(0)).logits)
    assert sum(published_of(parameter) is not None for parameter in again.parameters()) == 14


def test_the_guide_runs():
    (change,) = programs.changes((ROOT / "docs/te/published.md").read_text())
    printed = programs.run(change.after, "after")
    assert "model.layers.0.self_attn.q_proj" in printed, "the report of a merge"
    assert printed.count("base_model.model.model.layers.") == 14


def test_the_fp8_mode_trains(tmp_path):
    folder = write(tmp_path, ODD)
    model = on_meta(folder)
    load_published(model, folder, multiply="fp8")
    model = draw_adapters(peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(ALL))))
    losses, grads = gradients(model, 8)
    assert losses[-1] == losses[-1]
    assert all(grad.isfinite().all() for grad in grads.values())
