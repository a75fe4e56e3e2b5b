"""Whether FP8 sends tokens to other experts: routers and experts in several formats against float32, on a CPU.

    python -m benchmarks.router_agreement

A small byte-level mixture of experts is trained in float32. Its copies, converted in several ways, then read held-out
bytes, and in every layer the set of experts of each token is compared with that in float32. In the first layer only the
router and what is before it differ, in later ones also what earlier experts made. JSON and the table of the guide.
"""

import copy
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.marked import between_marks
from demos.common.corpus import Corpus, load_corpus
from demos.common.machine import machine_facts, package_versions
from fp8_torch_fsdp import ExpertLayout, convert_to_float8_training

HERE = Path(__file__).parent
RESULT = HERE / "results" / "router_agreement.json"
PAGE = HERE.parent / "docs" / "guides" / "torch-experts.md"
DIM, HIDDEN, LAYERS, EXPERTS, CHOSEN = 128, 128, 4, 16, 2
STEPS, ROWS, LENGTH, RATE, SEEDS, BATCHES = 150, 8, 64, 3e-3, (0, 1, 2), 4


class Experts(nn.Module):
    """Two products for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / math.sqrt(DIM))
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / math.sqrt(HIDDEN))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Return [rows, DIM] for rows sorted by expert."""
        hidden = F.gelu(F.grouped_mm(x, self.up.mT, offs=offsets))
        return F.grouped_mm(hidden, self.down.mT, offs=offsets)


def converted_forward(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Return what `Experts.forward` returns, with FP8 products."""
    return experts.grouped_product("down", F.gelu(experts.grouped_product("up", x, offsets)), offsets)


LAYOUT = {Experts: ExpertLayout(forward=converted_forward, weights=("up", "down"))}


class Mixture(nn.Module):
    """A router that sends each token to CHOSEN experts, and the experts; `seen` keeps its last choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, DIM] for [tokens, DIM]."""
        scores, chosen = self.router(x).float().softmax(-1).topk(CHOSEN)
        self.seen = chosen.sort(-1).values
        order = chosen.reshape(-1).argsort(stable=True)
        offsets = chosen.reshape(-1).bincount(minlength=EXPERTS).cumsum(0).int()
        y = self.experts(x[order // CHOSEN], offsets) * scores.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


class Block(nn.Module):
    """Causal attention and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, DIM]."""
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mixture(self.norms[1](x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, DIM), nn.Linear(DIM, 256, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [rows, length, 256]."""
        return self.head(self.blocks(self.embedding(tokens)))


def trained(corpus: Corpus, seed: int, steps: int = STEPS) -> Model:
    """Return a model after `steps` in float32."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        window = torch.from_numpy(corpus.batch(seed=seed, step=step, rank=0, rows=ROWS, length=LENGTH)).long()
        F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def is_router(module: nn.Module, name: str) -> bool:
    """Whether a layer is a router, as a filter of layers."""
    return name.endswith("router")


def converted(model: Model, way: str) -> Model:
    """Return a copy in bfloat16, of which some layers are in FP8; see `WAYS`."""
    low = copy.deepcopy(model).bfloat16()
    if way == "bf16":
        return low
    what, recipe = way.split(", ")
    filters = {"FP8 routers alone": is_router, "FP8 but routers": None, "FP8 with routers": None}
    convert_to_float8_training(
        low, recipe=recipe, experts=LAYOUT, routers="but" not in what, module_filter_fn=filters[what]
    )
    return low


WAYS = (
    "bf16",
    *(
        f"{what}, {recipe}"
        for recipe in ("tensorwise", "rowwise")
        for what in ("FP8 routers alone", "FP8 but routers", "FP8 with routers")
    ),
)


@torch.no_grad()
def choices(model: Model, corpus: Corpus) -> Tensor:
    """Return the experts of held-out tokens, sorted, [layers, tokens, CHOSEN]."""
    found = []
    for window in corpus.held_out_batches(batches=BATCHES, rank=0, ranks=1, rows=ROWS, length=LENGTH):
        model.eval()(torch.from_numpy(window[:, :-1]).long())
        found.append(torch.stack([block.mixture.seen for block in model.blocks]))
    return torch.cat(found, dim=1)


def changed(wanted: Tensor, found: Tensor) -> list[float]:
    """Return for each layer the share of tokens of which at least one expert is another."""
    return (wanted != found).any(-1).double().mean(1).tolist()


def measure() -> dict[str, Any]:
    """Return the file's content."""
    corpus, rows = load_corpus(None), []
    for seed in SEEDS:
        model = trained(corpus, seed)
        wanted = choices(model, corpus)
        for way in WAYS:
            shares = changed(wanted, choices(converted(model, way), corpus))
            rows.append({"seed": seed, "way": way, "changed": [round(share, 5) for share in shares]})
            print(rows[-1], flush=True)
    settings = {"dim": DIM, "layers": LAYERS, "experts": EXPERTS, "chosen": CHOSEN, "steps": STEPS}
    settings["tokens"] = BATCHES * ROWS * LENGTH
    return {"settings": settings, "machine": machine_facts(), "versions": package_versions(), "rows": rows}


def share(kept: dict[str, Any], way: str, layers: slice = slice(None)) -> float:
    """Return the share in percent of tokens that changed experts, over seeds and some layers."""
    found = [x for row in kept["rows"] if row["way"] == way for x in row["changed"][layers]]
    return 100 * statistics.fmean(found)


def table(kept: dict[str, Any]) -> str:
    """Return the table of the guide."""
    lines = ["| against float32 | first layer | all layers |", "|---|---|---|"]
    for way in WAYS:
        first, whole = share(kept, way, slice(1)), share(kept, way)
        lines.append(f"| {way} | {first:.1f}% | {whole:.1f}% |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the file and the table."""
    kept = measure()
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    page = PAGE.read_text()
    begin, end = "<!-- figures of benchmarks/results/router_agreement.json -->", "<!-- end of figures -->"
    PAGE.write_text(between_marks(page, begin, end, table(kept)))
    print(table(kept))


if __name__ == "__main__":
    main()
