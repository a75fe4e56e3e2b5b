"""`Capture`: what a CUDA graph would refuse in a training step, without a GPU; a program that checks every recipe.

Steps run eagerly on fake tensors of a GPU that is pretended. The first one is noted; the second is taken as captured,
and in it these are violations: a kernel, or an operator on some dtypes, that the first did not launch (its module would
be loaded); a copy between host and device; a wait of the host; and whatever the packages refuse to make in a capture,
such as tables of addresses that changed.

    python -m tests.helpers.captured_step      prints JSON: of each case, the violations of its captured step
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import fp8_common as common
import fp8_te_init as te
import fp8_torch_fsdp as f8
from benchmarks.modelled import record
from benchmarks.modelled.pretended_gpu import pretend_gpu
from fp8_common._kernels import Launch
from fp8_common.torch import casts, delayed, foreach

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
WIDTH = 512


class Capture(record.Recorder):
    """Notes what steps launch, and what a step that is captured may not do.

    Attributes:
        violations: Sentences, in order.
    """

    def __init__(self) -> None:
        super().__init__(record.Step())
        self.violations: list[str] = []
        self._capturing = False
        self._known: set[object] = set()
        self._addresses: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator["Capture"]:
        """Record steps; a captured one goes into `captured`."""
        replaced = {
            "torch.cuda.synchronize": lambda *_: self._host_waits("torch.cuda.synchronize"),
            "torch.cuda.Event.synchronize": lambda *_: self._host_waits("an event"),
            "torch.cuda.is_current_stream_capturing": lambda: self._capturing,
            "torch.Tensor.data_ptr": lambda tensor: self._address(tensor),
        }
        with contextlib.ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch(name, function))
            stack.enter_context(mock.patch.object(record, "Recorder", return_value=self))
            stack.enter_context(record.recording(self.step))
            yield self

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Take what happens inside as captured; an error ends it and is a violation."""
        self._capturing = True
        try:
            yield
        except Exception as error:
            self.violations.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        finally:
            self._capturing = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator and look at where its tensors are."""
        if self._capturing and record.WAITS.match(str(func)):
            self._host_waits(str(func))
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype.is_floating_point and 0.0  # there is no value
        if opaque := OPDEFS.get(func._schema.name):
            with self:  # fake tensors would go to its stand-in, and not to what it launches
                return opaque._init_fn(*args, **kwargs or {})
        out = super().__torch_dispatch__(func, kinds, args, kwargs)
        if out is NotImplemented or func.namespace == "prim":
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        # the host reads a scalar when it launches
        devices = {x.device.type for x in tensors if x.ndim or "copy" in str(func)}
        if self._capturing and {"cpu", "cuda"} <= devices:
            self.violations.append(f"{func} copies between host and device")
        if "cuda" in devices and not (func.is_view or record.NO_KERNEL.match(str(func))):
            self._launched((str(func), *(x.dtype for x in tensors)))
        return out

    def launch(self, plan: Launch, device: torch.device, **tensors: torch.Tensor) -> None:
        """Note the launch of a kernel as Triton tells kernels apart."""
        super().launch(plan, device, **tensors)
        if plan.grid:
            pointers = [(name, x.dtype, x.data_ptr() % 16 == 0) for name, x in sorted(tensors.items())]
            self._launched((plan.name, *pointers, *sorted(map(repr, plan.constants.items())), plan.num_warps))

    def _launched(self, key: tuple) -> None:
        if self._capturing and key not in self._known:
            self.violations.append(f"{key[0]} is launched for the first time")
        self._known.add(key)

    def _host_waits(self, what: str) -> None:
        if self._capturing:
            self.violations.append(f"the host waits for {what}")

    def _address(self, tensor: torch.Tensor) -> int:
        """Return an address that no other tensor has, for as long as the steps run."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._addresses:
            self._kept.append(storage)
            self._addresses[storage._cdata] = len(self._kept) << 40
        return self._addresses[storage._cdata] + tensor.storage_offset() * tensor.element_size()


def training_steps(convert: Callable[[nn.Module], Any], optimizer: Callable[..., Any]) -> Callable[[], None]:
    """Return a training step of two layers, converted in place."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    convert(model)
    optimizer = optimizer(model.parameters(), lr=0.1)
    x = torch.randn(4, 128, WIDTH, requires_grad=True)

    def step() -> None:
        y = model(x)
        y.backward(torch.ones_like(y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def linear_steps(recipe: str, *, several: bool = False) -> Callable[[], None]:
    """Return a step under `recipe`, with a policy of delayed scaling for each layer if `several`."""

    def convert(model: nn.Module) -> None:
        config = partial(f8.Float8TrainingConfig, recipe=recipe, all_gather=False)
        if several:
            longer = config(delayed=f8.DelayedScalingConfig(history_len=4))
            f8.convert_to_float8_training(model, config=longer, module_filter_fn=lambda layer, name: name == "0")
        f8.convert_to_float8_training(model, config=config())

    return training_steps(convert, torch.optim.SGD)


def primary_steps() -> Callable[[], None]:
    """Return a step of weights that are codes, written back by a `MasterOptimizer`."""
    convert = partial(te.convert_linear, preserve_high_precision_init_val=False)
    return training_steps(convert, partial(te.MasterOptimizer, torch.optim.SGD))


def foreach_steps() -> Callable[[], None]:
    """Return the amax and the casts of a list of shards of two dtypes, which are written to between."""
    shards = [torch.randn(n, dtype=dtype) for n, dtype in ((33, torch.float32), (0, torch.float32), (70, torch.half))]

    def step() -> None:
        foreach.quantize(shards, foreach.amax_bits(shards).view(torch.float32), common.E4M3)
        for shard in shards:
            shard.add_(1)

    return step


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    **{recipe: partial(linear_steps, recipe) for recipe in RECIPES},
    "several policies": partial(linear_steps, "tensorwise_delayed", several=True),
    "lists of shards": foreach_steps,
    "te-init": primary_steps,
}


def planted() -> dict[str, Callable[[], object]]:
    """Return steps that do in each run what a capture forbids."""
    x, sizes = torch.randn(64, WIDTH), itertools.count(1)
    cast = partial(casts.quantize_dynamic, fmt=common.E4M3, policy=common.CANONICAL, block=(1, 0))
    return {
        "upload": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "index": lambda: x[[0, 2]],
        "download": lambda: x.cpu(),
        "item": lambda: x.sum().item(),
        "list": lambda: x[0].tolist(),
        "wait": lambda: torch.cuda.synchronize(),
        "operator": lambda: x.to([torch.half, torch.double, torch.bfloat16][next(sizes) % 3]),
        "kernel": lambda: cast(x[:, : 32 << next(sizes)].contiguous()),
        "address": lambda: foreach.amax_bits([x.clone(), x]),
    }


def check(build: Callable[[], Callable[[], None]]) -> dict[str, list[str]]:
    """Return what a capture of the second step that `build` makes would refuse, and the kernels in it."""
    for cached in (foreach._cached, foreach._kept_for_graphs, delayed._numerators):
        cached.cache_clear()  # they hold fake tensors of the case before
    capture = Capture()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        with torch.device("cuda"):
            step = build()
        with capture.watching():
            step()
            before = len(capture.step.kernels)
            with capture.captured():
                step()
    ours = [kernel.name.split() for kernel in capture.step.kernels[before:]]
    kernels = sorted({words[1] for words in ours if words[0] == "fp8_common"})
    return {"violations": list(dict.fromkeys(capture.violations)), "kernels": kernels}


def main() -> int:
    """Print what was found in every case and in every planted one."""
    pretend_gpu()
    cases = {name: check(build) for name, build in CASES.items()}
    faults = {name: check(lambda name=name: planted()[name]) for name in planted()}
    print(json.dumps({"cases": cases, "planted": faults}, indent=1))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the pretended GPU cannot be taken down in order
