"""Two JAX processes on one machine: pipelined steps and FP8 all-gathers equal those of one process."""

import json

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def test_the_state_of_a_step_over_two_processes_equals_that_of_one(in_two_processes):
    found = json.loads(in_two_processes("owg_two_processes.py", devices=1)[0].splitlines()[-1])
    assert found["equal"] == {"stage": True, "data": True}
    assert found["seen"] == found["wanted"]


def test_two_processes_gather_the_bits_of_the_definition(in_two_processes):
    # the script checks, and fails
    assert len(in_two_processes("two_process_gather.py", devices=2)) == 2
