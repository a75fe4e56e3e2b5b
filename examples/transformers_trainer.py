"""Transformers' Trainer with FP8. Options are those of its `TrainingArguments`, and three of this program.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --output_dir run --use_cpu --max_steps 8
    torchrun --nproc-per-node 8 examples/transformers_trainer.py --output_dir run --max_steps 1000 --save_steps 100 \
        --bf16 --fsdp --fsdp_config '{"version": 2}' --model Qwen/Qwen3-8B-Base --data tokens.pt

Without `--model` it trains a tiny Llama with random weights, without `--data` on sequences that count upwards; nothing
is downloaded. tokens.pt holds one integer tensor [sequences, length].
"""

import dataclasses

import torch
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from fp8_torch_fsdp import convert_to_float8_training, float8_report
from fp8_torch_fsdp.integrations.transformers import Float8Callback


@dataclasses.dataclass
class Job:
    """What is trained."""

    model: str | None = None
    data: str | None = None
    recipe: str = "tensorwise"


def build(job: Job, arguments: TrainingArguments) -> torch.nn.Module:
    """Return the model with FP8 layers, not sharded yet."""
    if job.model:
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    else:
        torch.manual_seed(arguments.seed)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=False, **sizes))
    return convert_to_float8_training(model, recipe=job.recipe)  # before the Trainer, which shards


def main() -> None:
    """Train, evaluate, and print the first and the last loss."""
    job, arguments = HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses()
    tokens = (torch.arange(256)[:, None] + torch.arange(32)) % 128
    if job.data:
        tokens = torch.load(job.data, weights_only=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    cut = len(rows) * 9 // 10
    trainer = Trainer(
        model=build(job, arguments),
        args=arguments,
        train_dataset=rows[:cut],
        eval_dataset=rows[cut:],
        callbacks=[Float8Callback(every=100)],  # logs every layer; keeps delayed scales in checkpoints
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    held_out = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(float8_report(trainer.model).headline)
        print(f"first loss {losses[0]:.4f}  last loss {losses[-1]:.4f}  held-out loss {held_out:.4f}", flush=True)


if __name__ == "__main__":
    main()
