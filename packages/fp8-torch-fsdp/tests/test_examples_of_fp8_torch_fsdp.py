"""Examples in docstrings of the package and of its public names run."""

import doctest
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8_torch_fsdp

WITH_EXAMPLE = (
    "DelayedScalingConfig",
    "DelayedState",
    "ExpertLayout",
    "Float8ColwiseParallel",
    "Float8TrainingConfig",
    "Float8Log",
    "Float8Monitor",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "auto_filter_for_recipe",
    "compress_communication",
    "convert_to_float8_training",
    "dispatch_tokens",
    "float8_report",
    "fully_shard_traceable",
    "synchronize_scales",
    "unconvert",
    "weights_unchanged",
)
"""Public names whose docstring must have an example; a deleted example fails."""

CREATED_BY_CALLS = (
    "CompressedCommunication",
    "DispatchedTokens",
    "Float8Experts",
    "Float8Linear",
    "MatrixGatherStats",
    "ShardedFloat8Weight",
)
"""Public classes that users do not create; the calls that return them have examples."""


@pytest.fixture(autouse=True)
def no_process_group():
    """End the process group of an example that failed before its last line."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_examples(value, name):
    """Run the examples in the docstring of `value`; return their number."""
    names = {**vars(fp8_torch_fsdp), "torch": torch, "nn": nn}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(value, name, globs=names):
        runner.run(test)
    assert runner.failures == 0
    return runner.tries


def test_example_of_the_package_runs():
    assert run_examples(fp8_torch_fsdp, "fp8_torch_fsdp")


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_example_runs(name):
    assert run_examples(getattr(fp8_torch_fsdp, name), name), f"The docstring of {name} has no example."


def test_every_function_and_class_of_the_package_has_an_example():
    public = {name: getattr(fp8_torch_fsdp, name) for name in fp8_torch_fsdp.__all__}
    of_package = {
        name
        for name, value in public.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("fp8_torch_fsdp.")
    }
    assert of_package == {*WITH_EXAMPLE, *CREATED_BY_CALLS}


def test_examples_in_docstrings_are_marked():
    for name in WITH_EXAMPLE:
        doc = inspect.getdoc(getattr(fp8_torch_fsdp, name))
        assert "\nExamples:\n    >>> " in doc, name
