"""What error have sums of gradients that travel as FP8 codes?

    python -m benchmarks.gradient_error [--quick]

All ranks are rows of one array, rounded and summed by the NumPy definition (`fp8_common._reference.gradient_messages`),
and compared with the float64 sum.
"byte model" are gradients of one weight of a small language model after 60 steps, each
rank with a batch of its own.
"""

from typing import Any

import numpy as np
import torch

from benchmarks._common import options, save, table
from examples._report import load_corpus
from examples.compare_fsdp import ByteModel, loss_of
from fp8_common._reference.gradient_messages import round_gradients, sum_rounded

ELEMENTS, RANKS, TRAINED = 4096, (2, 8, 64), 60
KINDS = ("gaussian", "heavy-tailed", "sparse")
FORMATS = {"bf16": None, "E4M3": "e4m3", "E4M3, stochastic": "e4m3", "E5M2": "e5m2"}


def drawn(kind: str, ranks: int) -> np.ndarray:
    """Return float32 [ranks, elements]: a part that all ranks share, and noise of the same size on each.

    "heavy-tailed" is Student's t with 2 degrees of freedom, "sparse" has one element in 50 that is not 0.
    """
    random = np.random.default_rng(ranks)
    total = random.standard_normal((1, ELEMENTS)) + random.standard_normal((ranks, ELEMENTS))
    if kind == "heavy-tailed":
        total /= np.sqrt(np.square(random.standard_normal((2, ranks, ELEMENTS))).mean(0))
    if kind == "sparse":
        total *= random.random((1, ELEMENTS)) < 0.02
    return total.astype(np.float32)


def trained(ranks: int, steps: int) -> np.ndarray:
    """Return float32 [ranks, 16384]: gradients of one weight after `steps`, of as many small batches."""
    torch.manual_seed(0)
    corpus, model = load_corpus(), ByteModel(64, 2, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)

    def backward(step: int, rank: int, rows: int) -> None:
        codes = corpus.batch(seed=0, step=step, rank=rank, rows=rows, length=128)
        optimizer.zero_grad()
        loss_of(model, torch.from_numpy(codes).long()).backward()

    for step in range(steps):
        backward(step, 0, 8)
        optimizer.step()
    weight, found = model.get_parameter("blocks.0.up.weight"), []
    for rank in range(ranks):
        backward(steps, rank, 2)
        found.append(torch.as_tensor(weight.grad).flatten().numpy().copy())
    return np.stack(found)


def error(values: np.ndarray, fmt: str | None, random: tuple[int, int] | None = None) -> float:
    """Return the norm of the error of a sum over ranks by the norm of the sum; `random` as of `round_gradients`."""
    exact = values.astype(np.float64).sum(0)
    if fmt is None:
        arrived = torch.from_numpy(values).bfloat16().float().numpy().sum(0)
    else:
        arrived = sum_rounded(*round_gradients(values, fmt, random=random), fmt)
    return float(np.linalg.norm(arrived - exact) / np.linalg.norm(exact))


def main() -> None:
    """Measure and write."""
    chosen = options(__doc__, rounds=1).parse_args()
    most = trained(RANKS[0] if chosen.quick else max(RANKS), 2 if chosen.quick else TRAINED)
    rows: list[dict[str, Any]] = []
    for ranks in (count for count in RANKS if count <= len(most)):
        values = {**{kind: drawn(kind, ranks) for kind in KINDS}, "byte model": most[:ranks]}
        for name, fmt in FORMATS.items():
            random = (0, 0) if "stochastic" in name else None
            rows.append({"format": name, "ranks": ranks, **{kind: error(x, fmt, random) for kind, x in values.items()}})
    kinds = (*KINDS, "byte model")
    lines = [("relative error of the sum", "ranks", *kinds)]
    lines += [(row["format"], str(row["ranks"]), *(f"{row[kind]:.2%}" for kind in kinds)) for row in rows]
    save(chosen.results, "gradient_error", {"elements": ELEMENTS, "rows": rows}, table(lines))


if __name__ == "__main__":
    main()
