"""Hugging Face Transformers and Accelerate with FP8: convert the model before `prepare`.

    torchrun --nproc-per-node 2 examples/accelerate_transformers.py

Accelerate shards on GPUs only; on CPUs it trains replicas (DDP). Without torchrun it runs in one process. The model
is a tiny Llama with random weights; nothing is downloaded.
"""

import argparse
import gc

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_torch_fsdp import convert_to_float8_training, float8_report


def main() -> None:
    """Train a few steps and print losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recipe", default="tensorwise")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=False, **sizes))
    # before prepare, which shards, and before the optimizer, because weights become new parameters
    convert_to_float8_training(model, recipe=arguments.recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    distributed = torch.distributed.is_torchelastic_launched()
    accelerator = Accelerator(fsdp_plugin=plugin if distributed else None, cpu=not torch.cuda.is_available())
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.is_main_process:
        print(float8_report(model), flush=True)

    generator = torch.Generator().manual_seed(accelerator.process_index)
    first = torch.randint(128, (8, 1), generator=generator)
    tokens = ((first + torch.arange(32)) % 128).to(accelerator.device)
    for step in range(arguments.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    # A DDP model must not outlive its process group: with torch 2.13 over gloo its release can deadlock. It joins the
    # threads of the group while it holds Python's lock (GIL), and these may still wait for that lock to free a result.
    del model, optimizer
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


if __name__ == "__main__":
    main()
