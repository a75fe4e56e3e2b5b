"""Five steps of small models of every architecture on two ranks of FSDP2: bf16, FP8 of this package, FP8 of torchao.

Sizes differ from the published models, the layers and their forwards do not. Parameters are float32, products bfloat16
where they are not FP8; each rank has a batch of its own, the same one in each step.
"""

from typing import Any

import torch
import torch.distributed as dist
import torchao.float8
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8_torch_fsdp as f8
from tests.ecosystem.architectures import ARCHITECTURES, of_sizes

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
        return f8.convert_to_float8_training(model)
    if kind == "torchao":
        config = torchao.float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return torchao.float8.convert_to_float8_training(model, config=config)
    return model


def losses(rank: int, world_size: int, name: str, kind: str) -> list[float]:
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
            found[kind] = [round(loss, 4) for loss in pool.run(losses, name, kind, timeout=900)[0]]
        except AssertionError as error:  # what ranks raise
            if kind != "torchao":
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            found[kind] = next((line for line in reversed(lines) if "Error" in line), lines[-1])[:200]
    return found
