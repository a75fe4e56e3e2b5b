"""What FP8 makes of other people's models: a part of `benchmarks.figures`, which calls it "architectures".

Models are built by Transformers and Diffusers on the meta device, with the sizes of a published model, and converted
with the default recipe. Small ones, whose layers and forwards are the same, train five steps on two ranks of FSDP2:
bf16, FP8 of this package, FP8 of torchao. Their parameters are float32, products bfloat16 where they are not FP8; each
rank has a batch of its own, the same one in each step. Nothing is downloaded: sizes that are not the defaults stand
below.
"""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import torch.distributed as dist
import torchao
import torchao.float8
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.convert.report import Float8Report

LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN3_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262144, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
T5 = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16}
WHISPER = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
}  # fmt: skip


class Architecture(NamedTuple):
    """A model: its class and configuration in Transformers, and the sizes that differ from the defaults.

    Models of Diffusers take sizes without a configuration.
    """

    model: str
    config: str
    sizes: Mapping[str, Any] = {}


ARCHITECTURES = {
    "Mixtral 8x7B": Architecture("MixtralForCausalLM", "MixtralConfig"),
    "Qwen3-MoE 30B": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN3_MOE),
    "DeepSeek-V3": Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    "GPT-OSS 120B": Architecture("GptOssForCausalLM", "GptOssConfig"),
    "Llama 3 8B": Architecture("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Qwen3 8B": Architecture("Qwen3ForCausalLM", "Qwen3Config", QWEN3),
    "Gemma 3 4B": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3),
    "Mistral 7B": Architecture("MistralForCausalLM", "MistralConfig"),
    "BERT base": Architecture("BertForMaskedLM", "BertConfig"),
    "T5 large": Architecture("T5ForConditionalGeneration", "T5Config", T5),
    "Whisper large": Architecture("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "ViT base": Architecture("ViTForImageClassification", "ViTConfig"),
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config"),
    "DiT XL/2": Architecture("DiTTransformer2DModel", ""),
}
MIXTURES = ("Mixtral 8x7B", "Qwen3-MoE 30B", "DeepSeek-V3", "GPT-OSS 120B")


def of_sizes(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Return a model of the table with other sizes."""
    model, config, _ = ARCHITECTURES[name]
    if not config:
        return getattr(diffusers, model)(**sizes)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def built(name: str) -> nn.Module:
    """Return a model of the table on the meta device, at its real size."""
    with torch.device("meta"):
        return of_sizes(name, ARCHITECTURES[name].sizes)


def report(name: str) -> Float8Report:
    """Return what the conversion with the default recipe makes of a model."""
    model = built(name)
    return f8.float8_report(f8.convert_to_float8_training(model, heads=not _is_tied(model)))


def _is_tied(model: nn.Module) -> bool:
    """Return whether an output head has an embedding's weight: tables are those of models whose other heads are FP8."""
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    return any(isinstance(one, nn.Linear) and id(one.weight) in embedded for one in model.modules())


def row(name: str) -> dict[str, Any]:
    """Return what became FP8, and which classes with 0.2 % of the bytes and more did not."""
    found = report(name)
    left = [[kind, why, size / found.bytes] for kind, why, _, size in found.left if size * 500 >= found.bytes]
    sizes = {"parameters": found.bytes // 2, "converted": found.converted, "gathered": found.gathered}
    return {**sizes, "left": left}


STEPS = 5
KINDS = ("bf16", "fp8", "torchao")
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "d_ff": 96, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 16,
    "num_mel_bins": 16, "image_size": 32, "patch_size": 8, "pad_token_id": 0, "num_decoder_layers": 2,
}  # fmt: skip
"""What a configuration knows of these is so small; configurations know some of them by other names."""
OWN = {
    "DiT XL/2": {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8},
    "T5 large": {"decoder_start_token_id": 0},
    "Whisper large": {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
    "ViT base": {"num_labels": 16},
}


def small(name: str) -> nn.Module:
    """Return a small model of an architecture, in float32."""
    torch.manual_seed(0)
    config = ARCHITECTURES[name].config
    known = getattr(transformers, config)() if config else None
    sizes = {size: value for size, value in SIZES.items() if hasattr(known, size)} | OWN.get(name, {})
    return of_sizes(name, sizes).float()


def loss_of(name: str, model: nn.Module, rank: int) -> torch.Tensor:
    """Return the loss of the batch of `rank`."""
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(3, 128, (4, 16), generator=draw)
    if name == "DiT XL/2":
        images = torch.randn(4, 4, 8, 8, generator=draw)
        time, classes = torch.randint(1000, (4,), generator=draw), torch.arange(4)
        return (model(images, timestep=time, class_labels=classes).sample[:, :4] - images).square().mean()
    if name == "ViT base":
        return model(pixel_values=torch.randn(4, 3, 32, 32, generator=draw), labels=torch.arange(4)).loss
    if name == "Whisper large":
        return model(input_features=torch.randn(4, 16, 32, generator=draw), labels=tokens).loss
    return model(input_ids=tokens, labels=tokens).loss


def converted(model: nn.Module, kind: str) -> nn.Module:
    """Return the model as `kind` trains it."""
    if kind == "fp8":
        return f8.convert_to_float8_training(model, heads=not _is_tied(model))
    if kind == "torchao":
        config = torchao.float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return torchao.float8.convert_to_float8_training(model, config=config)
    return model


def trained(rank: int, world_size: int, name: str, kind: str) -> list[float]:
    """Return the mean loss of the ranks before each step and after the last one."""
    model = converted(small(name).train(), kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(STEPS + 1):
        torch.manual_seed(step)  # what models draw in a forward
        loss = loss_of(name, model, rank)
        mean = loss.detach().float()
        dist.all_reduce(mean)
        found.append(float(mean) / world_size)
        if step < STEPS:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def compared(pool: Any, name: str) -> dict[str, Any]:
    """Return the losses of each kind, or in one sentence why there are none."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        try:
            found[kind] = [round(loss, 4) for loss in pool.run(trained, name, kind, timeout=900)[0]]
        except AssertionError as error:  # what ranks raise
            if kind != "torchao":
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            found[kind] = next((line for line in reversed(lines) if "Error" in line), lines[-1])[:200]
    return found


def write(folder: Path) -> None:
    """Write the figures and both tables, a model after the other."""
    from tests.helpers.ranks import RankPool

    packages = {module.__name__: module.__version__ for module in (torch, transformers, diffusers, torchao)}
    pool, models = RankPool(2, collective_timeout=600), {}
    result = {"machine": platform.machine(), "packages": packages, "models": models}
    try:
        for name in ARCHITECTURES:
            models[name] = {**row(name), "losses": compared(pool, name)}
            print(name, models[name], flush=True)
            (folder / "architectures.json").write_text(json.dumps(result, indent=1) + "\n")
            (folder / "architectures.md").write_text(shares(models) + "\n")
            (folder / "architectures-trained.md").write_text(losses(models) + "\n")
    finally:
        pool.close()


def shares(models: Mapping[str, Any]) -> str:
    """Return the Markdown table of what was converted and gathered at real size, and what was left and why."""
    lines = ["| model | 10^9 parameters | converted | gathered | left |", "|---|---|---|---|---|"]
    for name, one in models.items():
        left = "; ".join(f"{share:.1%} {kind} ({why})" for kind, why, share in one["left"]) or "-"
        size = f"{one['parameters'] / 1e9:.3g}"
        lines.append(f"| {name} | {size} | {one['converted']:.1%} | {one['gathered']:.1%} | {left} |")
    return "\n".join(lines)


def losses(models: Mapping[str, Any]) -> str:
    """Return the Markdown table of losses of small models, before the first step and after the last one."""
    lines = ["| model | before | bf16 | FP8 | against bf16 | torchao |", "|---|---|---|---|---|---|"]
    for name, one in models.items():
        bf16, fp8, torchao = (one["losses"][kind] for kind in ("bf16", "fp8", "torchao"))
        apart = (fp8[-1] - bf16[-1]) / bf16[-1]
        theirs = torchao if isinstance(torchao, str) else f"{torchao[-1]:.4f}"
        lines.append(f"| {name} | {bf16[0]:.4f} | {bf16[-1]:.4f} | {fp8[-1]:.4f} | {apart:+.1%} | {theirs} |")
    return "\n".join(lines)
