"""Writing masters back into FP8 primary weights takes few launches and few bytes, on a pretended GPU."""

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers.repository import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a GPU can be pretended to torch 2.13 alone"),
    pytest.mark.skipif(sys.platform != "linux", reason="a GPU can be pretended on Linux alone"),
]

# Launches, and bytes for each element: float32 masters are read twice where one scale has to be known before the cast,
# codes are written, and then copied to their places.
# Of sharded weights the ranks reduce scales, or one amax: that is one launch more, and of rows and blocks their scales.
MOST = {
    "whole": {
        "tensorwise": (5, 12.01),
        "tensorwise_delayed": (17, 12.01),
        "rowwise": (2, 8.01),
        "blockwise": (2, 8.01),
    },
    "sharded": {
        "tensorwise": (8, 12.01),
        "tensorwise_delayed": (19, 12.01),
        "rowwise": (7, 8.1),
        "blockwise": (7, 8.1),
    },
}


def test_weights_are_written_back_in_few_launches_and_bytes():
    # in a process of its own, because nothing takes the pretended GPU back
    command = [sys.executable, "-m", "tests.helpers.write_back"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == MOST.keys()
    for way, recipes in MOST.items():
        assert found[way].keys() == recipes.keys()
        for recipe, (launches, moved) in recipes.items():
            one = found[way][recipe]
            assert 0 < one["launches"] <= launches, f"{way} {recipe}: {one}"
            assert 8 <= one["bytes"] <= moved, f"{way} {recipe}: {one}"
            assert one["waits"] == 0, f"{way} {recipe}: {one}"
