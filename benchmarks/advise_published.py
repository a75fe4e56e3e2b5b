"""Published throughputs beside those of the model behind `fp8 advise`: `python -m benchmarks.advise_published`."""

import dataclasses

from fp8_common.advise import ACCELERATORS, LINKS, SHAPES, Choice, Job, estimate

BF16 = 6150.0
"""Tokens per second and device in bf16, which the model is told: torchao's float8 README, as the rows below."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A row of torchao's float8 README: Llama 3 8B, 8 H100, 8192 tokens each, selective checkpointing, compiled.

    Attributes:
        choice: What was trained, with the bytes of torchao's own casts as counted in its compiled code.
        throughput: Tokens per second and device.
    """

    choice: Choice
    throughput: float


ROWS = {
    "tensorwise with FP8 gather": Published(
        choice=Choice(name="tensorwise", products="tensorwise", cast_bytes=123, weight_bytes=1.0), throughput=7689.5
    ),
    "row-wise with bf16 gather": Published(
        choice=Choice(name="rowwise", products="rowwise", rate=0.85, cast_bytes=200), throughput=6768
    ),
}


def modelled(row: Published) -> float:
    """Return the tokens per second and device that the model gives for a row."""
    job = Job(
        shape=SHAPES["llama3-8b"],
        ranks=8,
        tokens=8192,
        sequence=8192,
        micro_batches=1,
        recompute=0.5,
        accelerator=ACCELERATORS["h100-500w"],
        links=LINKS["infiniband-400"],
        measured=BF16,
    )
    return job.tokens / estimate(job, row.choice).seconds


def cells(row: Published) -> str:
    """Return a row's figures as the page shows them."""
    found = modelled(row)
    return f"{row.throughput:g} tokens/s | {found:.0f} tokens/s | {100 * (found / row.throughput - 1):+.1f} %"


if __name__ == "__main__":
    for name, row in ROWS.items():
        print(f"{name}: published | modelled | apart: {cells(row)}")
