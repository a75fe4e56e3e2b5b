"""Sizes of decoders from the `config.json` of Hugging Face: attention, gated linear units, experts."""

from collections.abc import Mapping
from typing import Any

from fp8_common._errors import Fp8Error

Weights = tuple[tuple[int, int], ...]
"""Linear layers as (out_features, in_features)."""

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What libraries call the number of experts of a block: Mixtral and GPT-OSS, Qwen3-MoE, DeepSeek."""


def decoder_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a `ModelShape`.

    Args:
        config: The configuration.
        where: Its name, for errors.

    Raises:
        Fp8Error: A size is missing.
    """
    experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    wide = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    needed = (*NEEDED, wide, *(("num_experts_per_tok",) if experts else ()))
    if missing := [name for name in needed if config.get(name) is None]:
        raise Fp8Error(f"{where} has no {', '.join(missing)}. Write the shapes out with --linear and --blocks.")
    width = config["hidden_size"]
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _grouped_queries(config)
    # DeepSeek counts its shared experts, Qwen2-MoE says how wide its one is
    shared = (config.get("n_shared_experts") or 0) * config[wide] or config.get("shared_expert_intermediate_size") or 0
    always = shared if experts else config["intermediate_size"]
    return {
        "blocks": config["num_hidden_layers"],
        "width": width,
        "linear": (*attention, *(_gated(always, width) if always else ())),
        "vocabulary": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "expert": _gated(config[wide], width) if experts else (),
        "experts": experts,
        "active": config["num_experts_per_tok"] if experts else 0,
    }


def _gated(wide: int, width: int) -> Weights:
    return (wide, width), (wide, width), (width, wide)


def _grouped_queries(config: Mapping[str, Any]) -> Weights:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    keys = head * (config.get("num_key_value_heads") or heads)
    return (head * heads, width), (keys, width), (keys, width), (width, head * heads)


def _latent_attention(config: Mapping[str, Any]) -> Weights:
    """DeepSeek's: queries, keys and values through matrices of low rank."""
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    queries, low = heads * (plain + rotated), config.get("q_lora_rank")
    return (
        *(((low, width), (queries, low)) if low else ((queries, width),)),
        (rank + rotated, width),
        (heads * (plain + value), rank),
        (width, heads * value),
    )
