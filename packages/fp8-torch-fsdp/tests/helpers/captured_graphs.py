"""`CapturedGraphs`: a backend of `torch.compile` that notes what forward and backward graphs call and keep."""

from typing import Any, NamedTuple

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx, compile_fx_inner


class Call(NamedTuple):
    """A call in a graph: "forward" or "backward", the operator, the tensors that it reads, and what it makes."""

    direction: str
    operator: str
    reads: list[Tensor]
    makes: Any


class CapturedGraphs:
    """Give it to `torch.compile(backend=...)`; graphs run as they are, or compiled by Inductor.

    Attributes:
        frames: How many graphs Dynamo captured.
        calls: What they call, on fake tensors.
        kept: What forward graphs keep for backward graphs, and return.
    """

    def __init__(self, *, inductor: bool = False) -> None:
        self.frames = 0
        self.calls: list[Call] = []
        self.kept: list[Tensor] = []
        if inductor:
            self._compile = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=self._by_inductor)
        else:
            self._compile = aot_autograd(
                fw_compiler=lambda graph, inputs: self._as_it_is(graph, "forward"),
                bw_compiler=lambda graph, inputs: self._as_it_is(graph, "backward"),
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile what Dynamo captured."""
        self.frames += 1
        return self._compile(graph, inputs)

    def gathers(self) -> list[int]:
        """Return how often codes are gathered in forward and in backward graphs."""
        coded = [one.direction for one in self.calls if "all_gather_into" in one.operator and one.makes.itemsize == 1]
        return [coded.count("forward"), coded.count("backward")]

    def _as_it_is(self, graph: Any, direction: str) -> Any:
        self._note(graph, direction)
        # aot_eager's own runner drops what a collective sends while gloo's thread still reads it
        interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
        return make_boxed_func(lambda *args: interpreter.run(*args))

    def _by_inductor(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self._note(graph, "backward" if options.get("is_backward") else "forward")
        return compile_fx_inner(graph, inputs, **options)

    def _note(self, graph: Any, direction: str) -> None:
        for node in graph.graph.nodes:
            values = [one.meta.get("val") for one in node.all_input_nodes]
            tensors = [value for value in values if isinstance(value, Tensor)]
            if node.op == "call_function":
                self.calls.append(Call(direction, str(node.target), tensors, node.meta.get("val")))
            elif node.op == "output" and direction == "forward":
                self.kept += tensors
