"""LoRA on a published FP8 model, sharded by FSDP2, without a bf16 copy of its weights.

    torchrun --standalone --nproc-per-node 2 finetune_published.py [--model FOLDER] [--steps 8]

Needs Transformers and PEFT. Without FOLDER, the download of a model in FP8, a small Llama is written and trained.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fp8_common import CastRecipe
from fp8_common.torch_layers.export import quantization_config, serving_state_dict
from fp8_te_init.published import convert_published, load_published


def small_model(folder: str | None = None) -> str:
    """Write a small Llama as FP8 models are published, with 128x128 blocks, and return its folder."""
    path = Path(folder or tempfile.mkdtemp())
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    casts = dict.fromkeys(linear, CastRecipe(granularity="blockwise_128x128"))
    state = serving_state_dict(model, casts, "deepseek")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")
    fields = config.to_dict() | {"quantization_config": quantization_config(model, casts, "deepseek")}
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def meta_model(folder: str) -> nn.Module:
    """Return the model of a folder without values."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config  # Transformers would build layers of its own
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are in no file
    return model


def main() -> None:
    """Train adapters on bytes that count up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with config.json and safetensors files")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    folders = [options.model or (small_model() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])

    model = meta_model(folder)
    convert_published(model, folder)  # before fully_shard: reads headers alone
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    loaded = load_published(model, folder)  # this rank's rows alone; adapters start as PEFT starts them
    print(f"rank {dist.get_rank()}: read {loaded.bytes_read:,} bytes of fp8 codes, scales and the rest")

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(64).view(1, 64).to(next(model.parameters()).device)
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained(tempfile.mkdtemp(), state_dict=state)  # the adapter alone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
