"""What `GroupOffsetsCheck` costs for each product of experts on two ranks over gloo, on one machine; JSON.

    python -m benchmarks.offsets_check [--save]

The experts of `bench_experts`, sharded by FSDP2 over both ranks, one thread each, and 64 rows. The check is called time
and again as a product calls it: what is timed is a look at the offsets, an all-reduce of 12 bytes, and the other rank.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.bench_experts import EXPERTS, WIDTH, ours
from demos.common.machine import machine_facts, package_versions
from fp8_torch_fsdp import GroupOffsetsCheck
from tests.helpers.ranks import rank_pools

RESULT = Path(__file__).parent / "results" / "offsets_check.json"
RANKS, ROWS, CALLS = 2, 64, 500


def seconds(rank: int, ranks: int) -> list[float]:
    """Return what each call of the check took this rank."""
    experts: Any = fully_shard(ours("tensorwise")[0])
    x = torch.randn(ROWS, WIDTH).bfloat16()
    offsets = (torch.arange(1, EXPERTS + 1) * (ROWS // EXPERTS)).int()
    found = []
    with torch.no_grad(), GroupOffsetsCheck(experts):
        experts(x, offsets)
        for _ in range(CALLS + 1):
            began = time.perf_counter()
            experts.fp8_offsets_check("gate_up", experts.fp8_products["gate_up"], x, experts.gate_up, offsets)
            found.append(time.perf_counter() - began)
    return found[1:]


def main() -> None:
    """Print the median, and write the file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with rank_pools() as run:
        of_ranks = run(RANKS, seconds)
    per_product = statistics.median(of_ranks[0])
    settings = {"ranks": RANKS, "backend": "gloo", "rows": ROWS, "experts": EXPERTS, "width": WIDTH, "calls": CALLS}
    kept: dict[str, Any] = {"settings": settings, "machine": machine_facts(), "versions": package_versions()}
    kept["seconds_per_product"] = round(per_product, 7)
    kept["quartiles"] = [round(q, 7) for q in statistics.quantiles(of_ranks[0])]
    print(f"{1e3 * per_product:.2f} ms for each product, quartiles {kept['quartiles']}")
    if options.save:
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
