"""The comparison of expert blocks on a CPU: what is timed, and what the file says."""

import json

import torch

from benchmarks import bench_experts as measured


@torch.no_grad()
def test_the_contenders_compute_the_same_block():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, measured.WIDTH, generator=generator).bfloat16()
    offsets = (torch.arange(1, measured.EXPERTS + 1) * 4).int()
    _, wanted = measured.with_product(measured.bf16)
    expected = wanted(x, offsets).float()
    for recipe in measured.RECIPES:
        _, forward = measured.ours(recipe)
        assert float((forward(x, offsets).float() - expected).norm() / expected.norm()) < 0.1


def test_the_kept_figures_are_ratios_of_steps_that_took_turns():
    kept = json.loads(measured.RESULT.read_text())
    assert kept["settings"]["threads"] == 1
    assert {len(row["seconds"]) for row in kept["rows"]} == {measured.ROUNDS}
    for recipe in ("tensorwise", "tensorwise_delayed", "rowwise"):
        assert measured.ratio(kept, f"ours, {recipe}", measured.TORCHAO) <= 0.5
    assert kept["times_torchao"] == measured.ratios(kept, measured.TORCHAO)
    assert kept["times_bf16"] == measured.ratios(kept, "bf16")
