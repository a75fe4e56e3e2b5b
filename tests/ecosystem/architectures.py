"""What FP8 makes of other people's models: `python -m tests.ecosystem.architectures` writes the figures of the table.

Models are built by Transformers and Diffusers on the meta device, with the sizes of a published model, and converted
with the default recipe; small ones train five steps beside their twins (`twins`). Nothing is downloaded: sizes that are
not the defaults stand below. The tables that guides include are written beside
them.
"""

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import torchao
import transformers
from torch import nn

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.convert.report import Float8Report

RESULT = Path(__file__).resolve().parents[2] / "benchmarks/results/architectures.json"

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
    return f8.float8_report(f8.convert_to_float8_training(built(name)))


def row(name: str) -> dict[str, Any]:
    """Return what became FP8, and which classes with 0.2 % of the bytes and more did not."""
    found = report(name)
    left = [[kind, why, size / found.bytes] for kind, why, _, size in found.left if size * 500 >= found.bytes]
    sizes = {"parameters": found.bytes // 2, "converted": found.converted, "gathered": found.gathered}
    return {**sizes, "left": left}


def main() -> None:
    """Write the figures, a model after the other; names choose models, the figures of others stay."""
    from tests.ecosystem.twins import compared
    from tests.helpers.ranks import RankPool

    names = sys.argv[1:] or ARCHITECTURES
    known = json.loads(RESULT.read_text())["models"] if sys.argv[1:] else {}
    pool, models = RankPool(2, collective_timeout=600), dict.fromkeys(ARCHITECTURES) | known
    try:
        for name in names:
            models[name] = {**row(name), "losses": compared(pool, name)}
            print(name, models[name], flush=True)
            write(models)
    finally:
        pool.close()


def write(models: Mapping[str, Any]) -> None:
    """Write what is known of models."""
    packages = {module.__name__: module.__version__ for module in (torch, transformers, diffusers, torchao)}
    done = {name: model for name, model in models.items() if model}
    result = {"machine": platform.machine(), "packages": packages, "models": done}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(shares(result) + "\n")
    RESULT.with_name("architectures-trained.md").write_text(losses(result) + "\n")


def shares(result: Mapping[str, Any]) -> str:
    """Return the Markdown table of what was converted and gathered at real size, and what was left and why."""
    lines = ["| model | 10^9 parameters | converted | gathered | left |", "|---|---|---|---|---|"]
    for name, one in result["models"].items():
        left = "; ".join(f"{share:.1%} {kind} ({why})" for kind, why, share in one["left"]) or "-"
        size = f"{one['parameters'] / 1e9:.3g}"
        lines.append(f"| {name} | {size} | {one['converted']:.1%} | {one['gathered']:.1%} | {left} |")
    return "\n".join(lines)


def losses(result: Mapping[str, Any]) -> str:
    """Return the Markdown table of losses of small models, before the first step and after the last one."""
    lines = ["| model | before | bf16 | FP8 | against bf16 | torchao |", "|---|---|---|---|---|---|"]
    for name, one in result["models"].items():
        bf16, fp8, torchao = (one["losses"][kind] for kind in ("bf16", "fp8", "torchao"))
        apart = (fp8[-1] - bf16[-1]) / bf16[-1]
        theirs = torchao if isinstance(torchao, str) else f"{torchao[-1]:.4f}"
        lines.append(f"| {name} | {bf16[0]:.4f} | {bf16[-1]:.4f} | {fp8[-1]:.4f} | {apart:+.1%} | {theirs} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
