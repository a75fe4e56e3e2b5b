"""Pools of ranks for tests: processes on one machine that talk over gloo and stay alive between calls.

A process that imports torch takes seconds to start. Without a GPU one process pays for that and all ranks are forked
from it, and a pool keeps its ranks. After a call that fails or takes too long the processes are replaced.
"""

import datetime
import functools
import importlib.util
import inspect
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

CALLS = 20
"""How many calls the processes of a pool answer. Groups that tests make have threads that poll, and live as long as
their process, because torch remembers them: 50 meshes of four ranks take half a core, idle."""
# What tests of several ranks import anyway; nothing here starts a thread, so that forking is safe.
PRELOADED = [
    *("tests.helpers.ranks", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"),
    *("torch._dynamo.backends.distributed", "torch._inductor.compile_fx", "torch._export.db.logging"),
    *("torch._export.passes", "torch.distributed.tensor.experimental"),  # else four seconds of a rank's first compiler
    *("fp8_torch_fsdp", "fp8_te_init"),
]


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message holds the traceback of each rank that told."""


class RankPool:
    """`world_size` processes in one gloo group that run the same function together.

    Args:
        world_size: Number of ranks.
        collective_timeout: Seconds after which a collective that not all ranks joined fails.
    """

    def __init__(self, world_size: int, collective_timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.collective_timeout = collective_timeout
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], *args: object, timeout: float = 120.0) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank and return the results in rank order.

        Args:
            function: A module-level function; its file is imported again in each process.
            *args: Picklable arguments.
            timeout: Seconds for all ranks together.

        Raises:
            RankError: Any rank raised, died or was late. The pool starts new processes for the next call.
        """
        if self._calls == CALLS:
            self.close()
        if not self._processes:
            self._start()
        self._calls += 1
        path = str(Path(function.__code__.co_filename).resolve())
        for pipe in self._pipes:
            pipe.send_bytes(_packed((path, function.__qualname__, args)))
        replies = self._collect(time.monotonic() + timeout)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(replies) if not ok]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [result for _, result in replies]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._calls = [], [], 0

    def _start(self) -> None:
        rank_process = _process_type()
        store = tempfile.NamedTemporaryFile(prefix="ranks-", delete=False).name  # noqa: SIM115 gloo outlives us
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            arguments = (rank, self.world_size, store, self.collective_timeout, theirs)
            process = rank_process(target=_serve, args=arguments, daemon=True)
            process.start()
            # Else the pipe stays open here when the rank dies, and reading from it would wait for ever.
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[tuple[bool, Any]]:
        """Wait for every rank; once one fails, the others get a moment to fail as well."""
        replies: list[tuple[bool, Any]] = [(False, "no answer in time")] * self.world_size
        waiting = dict(enumerate(self._pipes))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.5)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    replies[rank] = _unpacked(waiting[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)  # the pipe closes a moment before the exit code is known
                    replies[rank] = (False, f"died with exit code {self._processes[rank].exitcode}")
                del waiting[rank]
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + 10.0)
        return replies


@contextmanager
def rank_pools() -> Iterator[Callable[..., list[Any]]]:
    """Yield `run(world_size, function, *args, timeout=...)`: `RankPool.run` on one pool for each world size."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: object, timeout: float = 120.0) -> list[Any]:
        return pools.setdefault(world_size, RankPool(world_size)).run(function, *args, timeout=timeout)

    try:
        yield run
    finally:
        for pool in pools.values():
            pool.close()


def on_ranks(world_size: int | Callable[[Any], int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a module's function that every rank runs, with `rank` and the test's fixtures and parameters.

    `world_size` is the number of ranks, or a function that returns it of those fixtures and parameters, by their names.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in inspect.signature(body).parameters if name != "rank"]

        @pytest.mark.distributed
        @functools.wraps(body)
        def test(run_ranks: Callable[..., list[Any]], **given: Any) -> None:
            run_ranks(world_size if isinstance(world_size, int) else world_size(given), body, given)

        test.__signature__ = inspect.Signature(  # pyrefly: ignore[missing-attribute] for pytest
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("run_ranks", *names)]
        )
        # what ranks find under the name of the body
        test.on_rank = lambda rank, world_size, given: body(rank, **given)  # pyrefly: ignore[missing-attribute]
        return test

    return decorate


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Let this process be the first of several ranks, whose collectives send nothing."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _process_type() -> type[multiprocessing.process.BaseProcess]:
    """Return how ranks start: forked from a process that has imported torch, where the system can fork.

    With a GPU they are not: something imported for them asks CUDA for devices there, and forks can use none then.
    """
    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn").Process
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver").Process


def _serve(rank: int, world_size: int, store: str, timeout: float, pipe: Connection) -> None:
    """Join the group, then run what arrives until the pool goes away."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            path, name, args = _unpacked(pipe.recv_bytes())
        except EOFError:
            return
        # A compiler counts what it made of a function, and makes no more of it after some.
        torch.compiler.reset()
        try:
            pipe.send_bytes(_packed((True, _load(path, name)(rank, world_size, *args))))
        except BaseException:  # whatever it was, the parent reports it
            pipe.send_bytes(_packed((False, traceback.format_exc())))


def _packed(value: object) -> bytes:
    # `Connection.send` passes tensors as open files, for which both sides need a server; plain pickle knows no float8
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # from a process of ours, never from a file


def _load(path: str, name: str) -> Callable[..., Any]:
    module_name = f"ranks_{Path(path).stem}_{abs(hash(path))}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"Ranks run functions of Python files, got one of {path}. Move it to a module.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[module_name]
    for part in name.split("."):
        found = getattr(found, part)
    return getattr(found, "on_rank", found)
