"""What the repository says about the speed of an eager step is what was recorded."""

import json
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[3] / "benchmarks/results/step.json"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_bfloat16_step_takes_at_most_half_of_torchaos(recipe):
    """On a CPU; float32 steps spend longer in their plain products alone."""
    steps = {(s["dtype"], s["implementation"]): s for s in json.loads(RECORD.read_text())["steps"]}
    ours, peer = (steps["bfloat16", f"{who}, {recipe}"] for who in ("ours", "torchao"))
    assert ours["times_torchao"] <= 0.5
    assert ours["milliseconds"] / peer["milliseconds"] == pytest.approx(ours["times_torchao"], abs=0.01)
    assert 0 < steps["float32", f"ours, {recipe}"]["times_torchao"] < 1
