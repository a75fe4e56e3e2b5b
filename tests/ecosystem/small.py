"""What tests beside other libraries share: a small Llama of Transformers, and a few steps of training."""

import torch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**options):
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options))


def loaded(folder):
    """Return what Transformers loads, all of whose keys must fit."""
    import transformers

    model, info = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert [info[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys") if info[kind]] == []
    return model


def train(model, loss_of, steps=3):
    """Return the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local(tensor):
    """Return the part of this rank."""
    return getattr(tensor, "_local_tensor", tensor)
