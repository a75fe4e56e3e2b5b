"""What every test of the repository shares: which cases of a matrix run, and which machines a test needs.

`@pytest.mark.matrix(fmt=["e4m3", "e5m2"], block=[(1, 128), (128, 128)], seed=range(3))` gives a test every
combination under `pytest --full`, else a small subset in which any two values of different names still meet;
`matrix("each", ...)`, for expensive cases, a subset in which each value still occurs.
"""

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

STREAMS = 2

# Read when JAX is imported: a silent int32 -> float32 promotion in a test would hide one in the code.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Half of what JAX compiles in tests, another test has compiled before, often in the other process.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Only the session that installs every package also runs the examples in the documents.
if importlib.util.find_spec("sybil") and importlib.util.find_spec("torch"):
    from sybil import Sybil
    from sybil.evaluators.python import PythonEvaluator
    from sybil.parsers.markdown import CodeBlockParser, SkipParser

    from tests.helpers.programs import Printing, check_output

    # a block "output" stands for what the Python block before it prints
    blocks = [CodeBlockParser("python", Printing(PythonEvaluator())), CodeBlockParser("output", check_output)]
    pytest_collect_file = Sybil(
        parsers=[*blocks, SkipParser()], patterns=["README.md", "docs/*.md", "docs/**/*.md"]
    ).pytest()
else:

    class Unread(pytest.File):
        """A document without examples: one that `testpaths` names and nobody collects would be an error."""

        def collect(self) -> list[pytest.Item]:
            """Return nothing."""
            return []

    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
        """Take documents."""
        return Unread.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `--full`, and the settings of pytest-timeout where a site's own Python (session `gpu`) lacks it."""
    parser.addoption("--full", action="store_true", help="Run every case of a matrix, not a pairwise subset.")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "Seconds a test may take; needs pytest-timeout.")
        parser.addini("timeout_method", "How a late test is stopped; needs pytest-timeout.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that plugins would register, where these plugins are missing."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout, which is not installed")
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): needs pytest-xdist, which is not installed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread `@pytest.mark.matrix(name=values, ...)` over cases."""
    for marker in metafunc.definition.iter_markers("matrix"):
        axes = [list(values) for values in marker.kwargs.values()]
        subset = each if "each" in marker.args else pairwise
        cases = itertools.product(*axes) if metafunc.config.getoption("full") else subset(axes)
        metafunc.parametrize(tuple(marker.kwargs), list(cases))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the distributed tests among two streams, each for one process (`--dist loadgroup`).

    Each test starts up to four processes of its own, so more at a time would only wait for each other.
    """
    streams: dict[Path, int] = {}
    for item in items:
        if item.get_closest_marker("distributed"):
            stream = streams.setdefault(item.path, len(streams) % STREAMS)
            item.add_marker(pytest.mark.xdist_group(f"stream-{stream}"))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole matrix of cases was asked for."""
    return request.config.getoption("full")


@pytest.fixture(autouse=True)
def _empty_compiler() -> None:
    """Forget what earlier tests of this process have compiled: their number would decide what a function still may."""
    # not imported here: most tests do not compile, and some count what is imported
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world_size, function, *args)` runs `function(rank, world_size, *args)` on every rank.

    The tests of all packages share one pool of processes for each world size.
    """
    from tests.helpers.ranks import rank_pools

    with rank_pools() as run:
        yield run


def each(axes: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield as many combinations as the longest axis has values; the others turn, each at its own pace."""
    for i in range(max(map(len, axes))):
        yield tuple(axis[(i + k * (i // len(axis))) % len(axis)] for k, axis in enumerate(axes))


def pairwise(axes: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield few combinations, one value from each axis, so that any two values of two axes meet in one.

    Greedy: always the combination that covers most of the pairs that are left, the earliest of equals, so the
    choice is the same on every machine.
    """
    rows = [(row, frozenset(_pairs(row))) for row in itertools.product(*(range(len(axis)) for axis in axes))]
    left = frozenset[tuple[int, int, int, int]]().union(*(pairs for _, pairs in rows))
    while left:
        best, covered = max(rows, key=lambda item: len(item[1] & left))
        left -= covered
        yield tuple(axis[i] for axis, i in zip(axes, best, strict=True))


def _pairs(row: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """Name every pair of values in a row; a single axis pairs with itself."""
    cells = list(enumerate(row))
    pairs = itertools.combinations(cells, 2) if len(cells) > 1 else zip(cells, cells, strict=True)
    return ((a, i, b, j) for (a, i), (b, j) in pairs)
