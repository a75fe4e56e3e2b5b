"""Small checkpoints in the layouts in which FP8 models are published, by safetensors and torch alone, and their twins.

The fields of `config.json` and the names, dtypes and shapes of scales are those of the models that the layouts are
named after.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 517,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ODD = LLAMA | {"head_dim": 72, "intermediate_size": 416}
"""Sizes that 128 does not divide, and 517 rows that no number of ranks divides."""
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}

# quantization_config, name of the scale behind the layer's, its dtype, what shares one, a further scalar
LAYOUTS = {
    "deepseek": (FP8, "weight_scale_inv", torch.float32, "block", None),
    "qwen": (FP8 | {"modules_to_not_convert": ["lm_head"]}, "weight_scale_inv", torch.bfloat16, "block", None),
    "minimax": (FP8 | {"ignored_layers": ["lm_head"]}, "weight_scale_inv", torch.float32, "block", None),
    "deepseek-v4": (FP8 | {"scale_fmt": "ue8m0"}, "scale", torch.float8_e8m0fnu, "block", None),
    "ministral": (STATIC, "weight_scale_inv", torch.bfloat16, "tensor", "activation_scale"),
    "mistral-native": (STATIC, "qscale_weight", torch.float32, "tensor", "qscale_act"),
    "compressed-channel": (COMPRESSED, "weight_scale", torch.bfloat16, "channel", None),
    "compressed-tensor": (COMPRESSED, "weight_scale", torch.bfloat16, "tensor-1d", None),
    "modelopt": (MODELOPT, "weight_scale", torch.float32, "tensor", "input_scale"),
    "modelopt-blocks": (MODELOPT | {"quant_algo": "FP8_PB_WO"}, "weight_scale", torch.float32, "block-4d", None),
}


def wide(scale, shape):
    """Return scales of 128x128 blocks, each repeated over its block."""
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def quantize(w, how, dtype):
    """Return E4M3 codes and scales back from FP8, in the shape that the file has."""
    rows, columns = w.shape
    if how.startswith("block"):
        padded = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128))
        amax = padded.view(padded.shape[0] // 128, 128, -1, 128).abs().amax((1, 3))
    else:
        amax = w.abs().amax(1, keepdim=True) if how == "channel" else w.abs().amax()
    inv = amax / 448
    inv = torch.exp2(torch.ceil(torch.log2(inv))) if dtype == torch.float8_e8m0fnu else inv
    inv = inv.to(dtype)
    back = wide(inv.float(), w.shape) if how.startswith("block") else inv.float()
    codes = (w / back).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, {"tensor-1d": lambda: inv[None], "block-4d": lambda: inv[:, None, :, None]}.get(how, lambda: inv)()


def names_and_shapes(config):
    """Return shapes of plain tensors, and of linear weights, by name."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv, vocab = 4 * head, 2 * head, config["vocab_size"]
    plain, linear = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}, {}
    plain["lm_head.weight"] = (vocab, hidden)
    for n in range(config["num_hidden_layers"]):
        p = f"model.layers.{n}."
        plain |= {p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
        linear |= {f"{p}self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        linear[p + "self_attn.o_proj"] = (hidden, q)
        mlps = {p + "mlp.": config["intermediate_size"]}
        if "num_experts" in config:
            plain |= {p + "mlp.gate.weight": (config["num_experts"], hidden)}
            plain |= {p + "self_attn.q_norm.weight": (head,), p + "self_attn.k_norm.weight": (head,)}
            mlps = {f"{p}mlp.experts.{e}.": config["moe_intermediate_size"] for e in range(config["num_experts"])}
        for mlp, size in mlps.items():
            linear |= {mlp + "gate_proj": (size, hidden), mlp + "up_proj": (size, hidden)}
            linear[mlp + "down_proj"] = (hidden, size)
    return plain, linear


def write(folder, config=ODD, layout="deepseek", seed=0, shards=3):
    """Write a checkpoint; return its folder."""
    quantization, scale_name, dtype, how, scalar = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    plain, linear = names_and_shapes(config)
    tensors = {}
    for name, shape in plain.items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.05
        tensors[name] = values.to(torch.bfloat16)
    for name, shape in linear.items():
        # rows of different sizes, as trained weights have
        tails = torch.exp(0.3 * torch.randn(shape[0], 1, generator=generator))
        values = torch.randn(shape, generator=generator) * 0.03 * tails
        tensors[f"{name}.weight"], tensors[f"{name}.{scale_name}"] = quantize(values, how, dtype)
        if scalar is not None:
            tensors[f"{name}.{scalar}"] = torch.tensor(0.01, dtype=dtype)
    return write_tensors(folder, tensors, config | {"quantization_config": quantization}, shards)


def write_tensors(folder, tensors, config, shards=3):
    """Write tensors to several files with an index, or to one without."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = list(tensors)
    held = [names[shard::shards] for shard in range(shards)]
    files = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    files = files if shards > 1 else ["model.safetensors"]
    for file, own in zip(files, held, strict=True):
        save_file({name: tensors[name].contiguous() for name in own}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {name: file for file, own in zip(files, held, strict=True) for name in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def tensors_of(folder):
    """Return all tensors of a checkpoint, read by safetensors."""
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def values_of(tensors, name, dtype=torch.bfloat16):
    """Return a tensor of a checkpoint, dequantized: float32 code times float32 scale, rounded once."""
    codes = tensors[name]
    if codes.dtype != torch.float8_e4m3fn:
        return codes.to(dtype)
    layer = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale", f"{layer}.scale", f"{layer}.qscale_weight"]
    inv = next(tensors[one] for one in names if one in tensors).float()
    if inv.ndim == 4:
        inv = inv[:, 0, :, 0]
    if inv.ndim == 2 and inv.shape != (len(codes), 1):
        inv = wide(inv, codes.shape)
    return (codes.float() * inv).to(dtype)


VLLM_CODES, VLLM_SCALES = 8837446047745278671, 18096860091907716940
"""Digests of what vLLM 0.33 makes of `drawn_blocks`, on a CPU: see tests/ecosystem/test_with_vllm.py."""


def drawn_blocks():
    """Return codes [300, 200] and float32 scales of blocks, blocks of zeros and small values among them."""
    rng = np.random.default_rng(68)
    codes = torch.from_numpy(
        rng.integers(0, 127, (300, 200), dtype=np.uint8) | rng.integers(0, 2, (300, 200), dtype=np.uint8) << 7
    )
    codes[128:256, :128] = 0
    codes[256:] %= 64
    return codes.view(torch.float8_e4m3fn), torch.from_numpy(rng.lognormal(-8, 2, (3, 2)).astype(np.float32))


def engine_requantizes(codes, scale):
    """vLLM 0.33, `requant_weight_ue8m0_inplace`: amax of decoded blocks, the next power of two, rounded again."""
    values = codes.float() * wide(scale.float(), codes.shape)
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 128, 0, -values.shape[0] % 128))
    amax = padded.view(padded.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)).clamp(min=1e-4)
    new = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (values / wide(new, values.shape)).to(torch.float8_e4m3fn), new
