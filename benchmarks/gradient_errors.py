"""Errors of sums of gradients that travel as FP8 codes, over simulated ranks; JSON and the table of the page.

    python -m benchmarks.gradient_errors

Simulated: all ranks are rows of one tensor, rounded and summed by the functions that real ranks use
(`fp8_common.torch._gradients`). Measured against the float64 sum, for one reduction and for the mean of 32 reductions
of the same gradient: an error that the mean keeps is bias.

Some ways send a share of each rank's blocks, those of the largest magnitudes, in bfloat16 instead: an escape for
outliers, which the packages do not have.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demos.common.corpus import load_corpus
from demos.common.machine import machine_facts, package_versions
from demos.torch_fsdp.model import ByteModel, loss_of
from fp8_common.torch.plugin import dispatch
from fp8_torch_fsdp import GradientCompression
from fp8_torch_fsdp._gradients.random_rounding import RandomBits

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gradient_errors.json"
PAGE = HERE.parent / "docs" / "numerics" / "gradients.md"
BEGIN, END = "<!-- figures of benchmarks/results/gradient_errors.json -->\n", "\n<!-- end of figures -->"
RANKS, ELEMENTS, REPEATS = (2, 8, 64), 4096, 32
KINDS = ("gaussian", "heavy-tailed", "sparse", "byte model")
TRAINED = 60


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How gradients travel.

    Attributes:
        config: How they are rounded; None sends bfloat16.
        wide: Share of a rank's blocks that travel in bfloat16.
    """

    config: GradientCompression | None = None
    wide: float = 0.0


WAYS = {
    "bf16": Way(),
    "E4M3, nearest": Way(config=GradientCompression()),
    "E4M3, stochastic": Way(config=GradientCompression(rounding="stochastic")),
    "E4M3, nearest, feedback": Way(config=GradientCompression(error_feedback=True)),
    "E4M3, nearest, 1/32 of blocks bf16": Way(config=GradientCompression(), wide=1 / 32),
    "E4M3, nearest, 1/16 of blocks bf16": Way(config=GradientCompression(), wide=1 / 16),
    "E5M2, nearest": Way(config=GradientCompression(format="e5m2")),
}


def gradients(kind: str, ranks: int) -> Tensor:
    """Return float32 [ranks, elements]: a part that all ranks share, and noise of the same size on each.

    Args:
        kind: "gaussian"; "heavy-tailed" (Student's t with 2 degrees of freedom); "sparse" (one element in 50 is not 0);
            "byte model", see `trained_gradients`.
        ranks: Number of ranks.
    """
    if kind == "byte model":
        return trained_gradients()[:ranks]
    generator = torch.Generator().manual_seed(ranks)
    shared, own = (torch.randn(n, ELEMENTS, generator=generator) for n in (1, ranks))
    total = shared + own
    if kind == "heavy-tailed":
        total /= (torch.randn(2, *total.shape, generator=generator).square().mean(0)).sqrt()
    if kind == "sparse":
        total *= torch.rand(1, ELEMENTS, generator=generator) < 0.02
    return total


@functools.cache
def trained_gradients() -> Tensor:
    """Return float32 [64, 16384]: gradients of one weight of the demo's model after 60 steps, of 64 small batches."""
    torch.manual_seed(0)
    corpus, model = load_corpus(), ByteModel(64, 2, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)

    def gradients_of(step: int, rank: int, rows: int) -> None:
        codes = torch.from_numpy(corpus.batch(seed=0, step=step, rank=rank, rows=rows, length=128)).long()
        optimizer.zero_grad()
        loss_of(model(codes[:, :-1]), codes[:, 1:]).backward()

    for step in range(TRAINED):
        gradients_of(step, 0, 8)
        optimizer.step()
    weight, found = dict(model.named_parameters())["blocks.0.up.weight"], []
    for rank in range(max(RANKS)):
        gradients_of(TRAINED, rank, 2)
        found.append(torch.as_tensor(weight.grad).flatten().clone())
    return torch.stack(found)


def reduced(values: Tensor, way: Way, state: "RankState") -> Tensor:
    """Return the float32 sum over ranks of `values` [ranks, elements] as they arrive."""
    config = way.config
    if config is None:
        return sum_in_order(values.bfloat16().float())
    if state.residual is not None:
        values = values + state.residual
    arrived = torch.cat([_sent(row[None], config, bits) for row, bits in zip(values, state.bits, strict=True)])
    if way.wide:
        arrived = with_wide_blocks(arrived, values, config.block, way.wide)
    if state.residual is not None:
        state.residual = (values - arrived).bfloat16()
    return sum_in_order(arrived)


def with_wide_blocks(arrived: Tensor, values: Tensor, block: int, share: float) -> Tensor:
    """Return `arrived` [ranks, elements] with each rank's blocks of the largest magnitudes in bfloat16."""
    result, blocks = arrived.view(len(values), -1, block).clone(), values.view(len(values), -1, block)
    top = blocks.abs().amax(-1).topk(round(share * blocks.shape[1]), dim=1).indices
    ranks = torch.arange(len(values))[:, None]
    result[ranks, top] = blocks[ranks, top].bfloat16().float()
    return result.view_as(arrived)


def _sent(row: Tensor, config: GradientCompression, bits: RandomBits | None) -> Tensor:
    form = config.fp8_format, config.block
    random = None if bits is None else bits.draw(1, row.shape[1], config.block)
    message = dispatch.pack_gradients(row, row[:, :0], *form, None, random)
    return dispatch.unpack_gradients(message, (row.shape[1], 0), row.dtype, *form)[0][None]


def sum_in_order(parts: Tensor) -> Tensor:
    """Return the float32 sum of [ranks, elements] over ranks, first to last."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class RankState:
    """The random bits of each rank and what rounding took from it."""

    def __init__(self, config: GradientCompression | None, values: Tensor) -> None:
        stochastic = config is not None and config.rounding == "stochastic"
        self.bits = [RandomBits(0, rank) if stochastic else None for rank in range(len(values))]
        self.residual = torch.zeros_like(values) if config is not None and config.error_feedback else None


def errors(kind: str, ranks: int, way: Way) -> dict[str, float]:
    """Return relative errors (norm of the error by norm of the sum) of one reduction and of the mean of many."""
    values = gradients(kind, ranks)
    exact, state = values.double().sum(0), RankState(way.config, values)
    sums = [reduced(values, way, state).double() for _ in range(REPEATS)]

    def relative(total: Tensor) -> float:
        return float(f"{((total - exact).norm() / exact.norm()).item():.3g}")

    return {"one": relative(sums[0]), "mean": relative(torch.stack(sums).mean(0))}


def table(result: dict[str, Any]) -> str:
    """Return the table of the page."""
    kinds = list(dict.fromkeys(row["gradients"] for row in result["rows"]))
    lines = ["| way | ranks | " + " | ".join(kinds) + " |", "|---|---|" + "---|" * len(kinds)]
    for way in WAYS:
        for ranks in RANKS:
            found = {r["gradients"]: r for r in result["rows"] if (r["way"], r["ranks"]) == (way, ranks)}
            cells = [f"{100 * found[kind]['one']:.2f} / {100 * found[kind]['mean']:.2f} %" for kind in kinds]
            lines.append(f"| {way} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the JSON and put the table into the page."""
    rows = [
        {"way": name, "ranks": ranks, "gradients": kind, **errors(kind, ranks, way)}
        for name, way in WAYS.items()
        for ranks in RANKS
        for kind in KINDS
    ]
    settings = {"elements": ELEMENTS, "repeats": REPEATS, "byte_model_steps": TRAINED}
    result = {"settings": settings, "machine": machine_facts(), "versions": package_versions(), "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
