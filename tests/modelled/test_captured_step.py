"""CUDA graphs: the second training step holds nothing that a capture forbids, shown on a GPU that is pretended."""

import json

import pytest

from tests.helpers.processes import on_a_pretended_gpu, python

pytestmark = [on_a_pretended_gpu, pytest.mark.xdist_group("captured step")]  # all read one program's findings

# Kernels that a captured step must hold: a case that launched nothing would pass for no reason.
KERNELS = {
    "tensorwise": {"amax", "cast"},
    "tensorwise_delayed": {"cast", "delayed_update"},
    "rowwise": {"rowwise"},
    "rowwise_with_gw_hp": {"rowwise"},
    "blockwise": {"block_both"},
    "several policies": {"cast", "delayed_update"},
    "lists of shards": {"foreach_amax", "foreach_cast"},
    "te-init": {"amax", "cast"},
}
PLANTED = {
    "upload": "copies between host and device",
    "index": "copies between host and device",
    "download": "copies between host and device",
    "item": "the host waits",
    "list": "the host waits",
    "wait": "the host waits",
    "operator": "is launched for the first time",
    "kernel": "is launched for the first time",
    "address": "Run a training step with the same shapes and parameters before the capture.",
}


@pytest.fixture(scope="module")
def found():
    # in a process of its own, because nothing takes the pretended GPU back
    found = json.loads(python("-m", "tests.helpers.captured_step"))
    assert (found["cases"].keys(), found["planted"].keys()) == (KERNELS.keys(), PLANTED.keys())
    return found


@pytest.mark.parametrize("case", KERNELS)
def test_the_second_step_can_be_captured(found, case):
    assert found["cases"][case]["violations"] == []
    kernels = set(found["cases"][case]["kernels"])
    # casts may come with transposes or with scales of their own
    assert all(any(kernel.startswith(name) for kernel in kernels) for name in KERNELS[case]), kernels


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_violations_are_found(found, fault):
    assert any(PLANTED[fault] in sentence for sentence in found["planted"][fault]["violations"])
