"""Sizes of the models that `fp8 advise` accepts by name.

They are from the `config.json` files on the Hugging Face hub.
"""

from collections.abc import Mapping
from typing import Any


def _decoder(
    width: int, blocks: int, heads: int, hidden: int, vocabulary: int, *, kv: int, **more: Any
) -> dict[str, Any]:
    """Return the fields of a dense decoder with gated linear units."""
    return {
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
    } | more


def _experts(count: int, per_token: int, hidden: int | None = None) -> dict[str, Any]:
    """Return the fields of experts that replace the gated linear unit."""
    fields = {} if hidden is None else {"moe_intermediate_size": hidden}
    return {"num_experts": count, "num_experts_per_tok": per_token} | fields


LLAMA2, LLAMA3, QWEN3, TIED = 32000, 128256, 151936, {"tie_word_embeddings": True}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _decoder(4096, 32, 32, 11008, LLAMA2, kv=32),
    "meta-llama/Llama-2-13b-hf": _decoder(5120, 40, 40, 13824, LLAMA2, kv=40),
    "meta-llama/Llama-2-70b-hf": _decoder(8192, 80, 64, 28672, LLAMA2, kv=8),
    "meta-llama/Llama-3.2-1B": _decoder(2048, 16, 32, 8192, LLAMA3, kv=8, **TIED),
    "meta-llama/Llama-3.2-3B": _decoder(3072, 28, 24, 8192, LLAMA3, kv=8, **TIED),
    "meta-llama/Llama-3.1-8B": _decoder(4096, 32, 32, 14336, LLAMA3, kv=8),
    "meta-llama/Llama-3.1-70B": _decoder(8192, 80, 64, 28672, LLAMA3, kv=8),
    "meta-llama/Llama-3.1-405B": _decoder(16384, 126, 128, 53248, LLAMA3, kv=8),
    "mistralai/Mistral-7B-v0.3": _decoder(4096, 32, 32, 14336, 32768, kv=8),
    "mistralai/Mixtral-8x7B-v0.1": _decoder(4096, 32, 32, 14336, 32000, kv=8, **_experts(8, 2)),
    "mistralai/Mixtral-8x22B-v0.1": _decoder(6144, 56, 48, 16384, 32000, kv=8, **_experts(8, 2)),
    "Qwen/Qwen2.5-7B": _decoder(3584, 28, 28, 18944, 152064, kv=4),
    "Qwen/Qwen2.5-72B": _decoder(8192, 80, 64, 29568, 152064, kv=8),
    "Qwen/Qwen3-0.6B": _decoder(1024, 28, 16, 3072, QWEN3, kv=8, head_dim=128, **TIED),
    "Qwen/Qwen3-1.7B": _decoder(2048, 28, 16, 6144, QWEN3, kv=8, head_dim=128, **TIED),
    "Qwen/Qwen3-4B": _decoder(2560, 36, 32, 9728, QWEN3, kv=8, head_dim=128, **TIED),
    "Qwen/Qwen3-8B": _decoder(4096, 36, 32, 12288, QWEN3, kv=8, head_dim=128),
    "Qwen/Qwen3-14B": _decoder(5120, 40, 40, 17408, QWEN3, kv=8, head_dim=128),
    "Qwen/Qwen3-32B": _decoder(5120, 64, 64, 25600, QWEN3, kv=8, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _decoder(2048, 48, 32, 6144, QWEN3, kv=4, head_dim=128, **_experts(128, 8, 768)),
    "Qwen/Qwen3-235B-A22B": _decoder(4096, 94, 64, 12288, QWEN3, kv=4, head_dim=128, **_experts(128, 8, 1536)),
    "openai/gpt-oss-20b": _decoder(2880, 24, 64, 2880, 201088, kv=8, head_dim=64, **_experts(32, 4)),
}
SHORT = {"llama3-8b": "meta-llama/Llama-3.1-8B", "llama3-70b": "meta-llama/Llama-3.1-70B"}
"""Short names of some models."""
