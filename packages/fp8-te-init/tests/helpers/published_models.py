"""A Llama, with experts too, under the names of Transformers, and adapters under those of PEFT: torch alone."""

import zlib

import torch
import torch.nn.functional as F
from torch import nn

from fp8_common.torch.compat import local_of
from fp8_common.torch_layers.sharding.fsdp import region_of
from published_files import tensors_of, values_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class Attention(nn.Module):
    def __init__(self, hidden, head, **kwargs):
        super().__init__()
        self.head = head
        self.q_proj = nn.Linear(hidden, 4 * head, bias=False, **kwargs)
        self.k_proj = nn.Linear(hidden, 2 * head, bias=False, **kwargs)
        self.v_proj = nn.Linear(hidden, 2 * head, bias=False, **kwargs)
        self.o_proj = nn.Linear(4 * head, hidden, bias=False, **kwargs)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, hidden, size, **kwargs):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False, **kwargs)
        self.up_proj = nn.Linear(hidden, size, bias=False, **kwargs)
        self.down_proj = nn.Linear(size, hidden, bias=False, **kwargs)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, hidden, size, experts, **kwargs):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * size, hidden, **kwargs))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, size, **kwargs))

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class MoeMlp(nn.Module):
    def __init__(self, hidden, size, experts, **kwargs):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False, **kwargs)
        self.experts = Experts(hidden, size, experts, **kwargs)

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).float().softmax(-1).topk(2, -1)
        return self.experts(flat, chosen, weights.to(x.dtype)).view(x.shape)


class Layer(nn.Module):
    def __init__(self, config, **kwargs):
        super().__init__()
        hidden = config["hidden_size"]
        self.self_attn = Attention(hidden, config["head_dim"], **kwargs)
        if "num_experts" in config:
            self.mlp = MoeMlp(hidden, config["moe_intermediate_size"], config["num_experts"], **kwargs)
            self.self_attn.q_norm = nn.RMSNorm(config["head_dim"], **kwargs)
            self.self_attn.k_norm = nn.RMSNorm(config["head_dim"], **kwargs)
        else:
            self.mlp = Mlp(hidden, config["intermediate_size"], **kwargs)
        self.input_layernorm = nn.RMSNorm(hidden, **kwargs)
        self.post_attention_layernorm = nn.RMSNorm(hidden, **kwargs)
        self.recompute = False

    def forward(self, x):
        if self.recompute:
            return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config, **kwargs):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"], **kwargs)
        self.layers = nn.ModuleList(Layer(config, **kwargs) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], **kwargs)


class Llama(nn.Module):
    def __init__(self, config, dtype=torch.bfloat16, device="meta"):
        super().__init__()
        self.model = Model(config, dtype=dtype, device=device)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False, dtype=dtype, device=device)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class Lora(nn.Module):
    """What PEFT puts in the place of a linear layer, with its names; `magnitude` makes it DoRA."""

    def __init__(self, base, rank=8, dtype=torch.bfloat16, magnitude=False):
        super().__init__()
        self.base_layer = base
        options = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **options)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **options)})
        if magnitude:
            self.lora_magnitude_vector = nn.ModuleDict({"default": Magnitude(base.out_features, **options)})

    def get_delta_weight(self, adapter):
        return 2 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight

    def forward(self, x):
        y, a, b = self.base_layer(x), self.lora_A["default"], self.lora_B["default"]
        if not hasattr(self, "lora_magnitude_vector"):
            return y + (b(a(x.to(a.weight.dtype))) * 2).to(y.dtype)
        return self.lora_magnitude_vector["default"](x, a, b, self.base_layer)


class Magnitude(nn.Module):
    """DoRA as PEFT computes it: the norm of rows of weight and adapter, without a gradient of its own."""

    def __init__(self, rows, bias, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, **options))

    def forward(self, x, a, b, base):
        delta = b(a(torch.eye(a.in_features, dtype=x.dtype))).T
        weight = base.weight.to(x.dtype)
        norm = torch.linalg.norm(weight + 2 * delta.detach(), dim=1).to(weight.dtype)
        scale = (self.weight / norm.detach()).view(1, -1)
        return scale * F.linear(x, weight) + scale * b(a(x)) * 2


def adapt(model, targets=ALL, **options):
    """Put adapters beside the layers with these names, and freeze all else."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        above, _, last = name.rpartition(".")
        if last in targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(above), last, Lora(module, **options).requires_grad_(True))
            model.get_submodule(name).base_layer.requires_grad_(False)
    return model


@torch.no_grad()
def draw_adapters(model):
    """Draw all adapters, B too, from their names: the same for every number of ranks."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn, first = torch.randn(parameter.shape, generator=generator) * 0.02, region_of(parameter).offset[0]
            local_of(parameter).copy_(drawn[first : first + len(local_of(parameter))])
    return model


@torch.no_grad()
def fill_twin(model, folder, dtype=torch.bfloat16):
    """Fill a model of plain weights with dequantized values, this rank's rows."""
    tensors = tensors_of(folder)
    for name, parameter in model.named_parameters():
        key = name.replace(".base_layer", "")
        if key in tensors:
            values = values_of(tensors, key, dtype)
        elif key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            above, parts = key.rpartition(".")[0], ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            stacked = [
                torch.cat([values_of(tensors, f"{above}.{expert}.{part}.weight", dtype) for part in parts])
                for expert in range(parameter.shape[0])
            ]
            values = torch.stack(stacked)
        else:
            continue
        first = region_of(parameter).offset[0]
        local_of(parameter).copy_(values[first : first + len(local_of(parameter))])
    return model


def batch(step, vocab=517, rows=2, length=16):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
