"""What tests on a GPU share; where a test runs on a CPU, too, it says so by `DEVICES`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def sync_debug(device: str, mode: str = "error") -> Iterator[None]:
    """Let CUDA warn of ("warn"), or raise at, every place where the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def graph_of(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Do `work` once as it is, capture it in a graph without doing it, and return the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
