"""The model of `fp8 advise` beside published throughputs: torchao's float8 README, Llama 3 8B on 8 H100."""

import pytest

from fp8_common.advise import ACCELERATORS, LINKS, SHAPES, Choice, Job, estimate

BF16 = 6150.0
"""Tokens per second and device in bf16, which the model is told."""


@pytest.mark.parametrize(
    ("choice", "throughput"),
    [
        # bytes of torchao's own casts, as counted in its compiled code
        (Choice(name="tensorwise", products="tensorwise", cast_bytes=123, weight_bytes=1.0), 7689.5),
        (Choice(name="rowwise", products="rowwise", rate=0.85, cast_bytes=200), 6768.0),
    ],
    ids=["tensorwise with FP8 gather", "row-wise with bf16 gather"],
)
def test_a_published_row_comes_out_within_ten_percent(choice, throughput):
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
    assert job.tokens / estimate(job, choice).seconds == pytest.approx(throughput, rel=0.10)
