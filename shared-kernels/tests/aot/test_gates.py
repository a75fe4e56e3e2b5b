"""Compiled kernels stay within every limit on every architecture, and worsened kernels exceed them."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest
import triton

import fp8_common._kernels
from benchmarks import _aot as aot

NAMES = [case.name for case in aot.cases()]
SOURCES = Path(fp8_common._kernels.__file__).parent

# Triton, case, compute capability: times the issue budget. The oldest supported Triton makes up to 13.9 instructions
# per element of this kernel for 16-bit inputs, 5 % more than an H100 issues while it moves the bytes; the pinned one
# stays below the budget.
SLACK = {("3.6", "row-wise, 1024 columns", 90): 1.05}

# kernel, case, source text, what stands in its place, what the gates must say, compute capability
MUTATIONS = {
    "scale-division": (
        "rowwise", "row-wise", "tl.div_rn(fmax, amax)", "(fmax / amax)", "divides approximately", 90,
    ),
    "reciprocal": (
        "rowwise", "row-wise", "tl.div_rn(1.0, scale)", "(1.0 / scale)", "divides approximately", 90,
    ),
    "float-maximum": (
        "rowwise", "row-wise", "key = widen_key(tl.max(narrow_key(x), axis=1), x.dtype)",
        "key = tl.max(tl.abs(x.to(tl.float32)), axis=1).to(tl.int32, bitcast=True)", "drops NaN", 90,
    ),
    "double-rounding": (
        "cast", "cast", "to_fp8(scaled(x, scale), F8)", "scaled(x, scale).to(F8)", "float16", 89,
    ),
    "float64": (
        "rowwise", "row-wise", "tl.div_rn(fmax, amax)", "(fmax / amax.to(tl.float64)).to(tl.float32)", "float64", 90,
    ),
    "strided-store": (
        "mx", "MX rceil", "tl.store(y_ptr + at,", "tl.store(y_ptr + 3 * at,", "narrow accesses", 90,
    ),
    "second-read": (
        "rowwise", "row-wise", "    scale = scale_of_key(key, 1.0, FMAX, RULE)\n    tl.store(y_ptr",
        "    scale = scale_of_key(key, 1.0, FMAX, RULE)\n    tl.debug_barrier()\n"
        "    x = tl.load(x_ptr + at, mask=mask, other=0.0, volatile=True)\n    tl.store(y_ptr",
        "bytes per element", 90,
    ),
}  # fmt: skip


def case(name, dtype="bfloat16", fmt="e4m3"):
    return next(c for c in aot.cases(dtype, fmt) if c.name == name)


def mutant(folder, name, kernel, old, new):
    """Return `kernel` from a copy of all kernels, importable as `name`, in which the text `old` is `new`."""
    texts = {path.name: path.read_text() for path in SOURCES.glob("*.py")}
    assert any(old in text for text in texts.values()), f"No kernel contains {old!r} any more."
    for file, text in texts.items():
        (folder / file).write_text(text.replace(old, new).replace("fp8_common._kernels", name))
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    files = (sys.modules.get(f"{name}.{path.stem}") for path in SOURCES.glob("*.py"))
    return next(getattr(file, f"{kernel}_kernel") for file in files if hasattr(file, f"{kernel}_kernel"))


@pytest.mark.matrix(
    name=NAMES, capability=aot.ARCHITECTURES, dtype=["bfloat16", "float16", "float32"], fmt=["e4m3", "e5m2"]
)
def test_every_kernel_passes_every_gate(name, capability, dtype, fmt):
    slack = SLACK.get((importlib.metadata.version("triton").rpartition(".")[0], name, capability), 1.0)
    assert aot.failures(aot.measure(case(name, dtype, fmt), capability), slack=slack) == []


def test_a_spill_is_found():
    found = aot.failures(aot.measure(case("cast + transpose"), 90, maxnreg=32))
    assert any("spills" in message for message in found)


@pytest.mark.parametrize("change", MUTATIONS)
def test_a_worse_kernel_is_found(tmp_path, change):
    if change == "double-rounding" and triton.__version__ >= "3.9":
        pytest.skip("from Triton 3.9 on casts to FP8 no longer round to float16 on the way")
    kernel, name, old, new, message, capability = MUTATIONS[change]
    worse = mutant(tmp_path, f"mutant_{change.replace('-', '_')}", kernel, old, new)
    found = aot.failures(aot.measure(case(name), capability, kernel=worse))
    assert any(message in entry for entry in found), found
