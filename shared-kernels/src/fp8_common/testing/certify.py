"""`certify`: tests bitwise properties of a model by perturbation.

Frameworks convert a model to a `Subject`; this module uses NumPy only. `rows`, `from_file`, `table` and `explanations`
serve the command `fp8 certify`. A trace has the results of one run in order of
computation: outputs of layers by name, then gradients as "NAME gradient". A result "no" has a counterexample, which is
reduced to be small. "yes" means that no tested perturbation has shown a dependence.
"""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8_common._machine import detect
from fp8_common._reference.quantize import block_amax, dequantize, expand_blocks, quantize
from fp8_common._reference.scaling import amax, amax_to_scale
from fp8_common.errors import Fp8Error
from fp8_common.plugin import discover
from fp8_common.presets import mx, te_current, te_delayed
from fp8_common.recipe import BLOCKS, CastRecipe, Recipe

Property = Literal[
    "causal",
    "batch-invariant",
    "padding-invariant",
    "mesh-invariant",
    "chunk-invariant",
    "idempotent",
    "replayable",
]
PROPERTIES: tuple[Property, ...] = Property.__args__  # pyrefly: ignore[missing-attribute]
Trace = Mapping[str, NDArray[Any]]
Cast = Callable[[NDArray[Any]], Sequence[NDArray[Any]]]
"""Function of values that returns the decoded values, then other results of the cast: scales, codes."""

GRADIENT = " gradient"
"""Suffix of the names of gradients in a trace."""
STRENGTHS = (1.0, 64.0, 2.0**14)
"""Relative perturbations: within the range of other values, outside of it, and outside of the FP8 range. float16 does
not use the last one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PropertyResult:
    """Result for one property.

    Attributes:
        result: "yes", "no", or "untested".
        reason: Counterexample, or reason why the property was not tested; "" for "yes".
        layer: Name of the first layer whose output differs; "NAME gradient" for the gradient of a parameter.
        input: Index of the changed element of the inputs; None if no input was changed.
        output: Index of the first element of the layer's output, or of the gradient, that differs.
    """

    result: Literal["yes", "no", "untested"]
    reason: str = ""
    layer: str | None = None
    input: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """Return the result as the cell of a table."""
        shown = "-" if self.result == "untested" else self.result
        return shown + " (gradient)" * (self.layer or "").endswith(GRADIENT)


Certificate = Mapping[Property, PropertyResult]
"""Results of the tested properties."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Interface of a model for `certify`.

    Attributes:
        inputs: Inputs [examples, tokens, ...], floats or integers.
        start: Function that returns the model's initial state.
        step: Function of a state, inputs, a bool array [examples, tokens] of outputs that count in the loss, and a
            number of micro-batches. It returns the trace, and a function that returns the next state. It may change the
            given state.
        reload: Function that saves and loads a state, and returns the loaded one. The given state does not change.
        meshes: Function that returns traces of two steps on meshes of several sizes, by "N ranks, rank R". The first
            entry is the reference.
        casts: Casts into FP8 by name.
    """

    inputs: NDArray[Any]
    start: Callable[[], Any]
    step: Callable[[Any, NDArray[Any], NDArray[np.bool_], int], tuple[Trace, Callable[[], Any]]]
    reload: Callable[[Any], Any] | None = None
    meshes: Callable[[], Mapping[str, Trace]] | None = None
    casts: Mapping[str, Cast] = dataclasses.field(default_factory=dict)

    def run(self, inputs: NDArray[Any], counted: NDArray[np.bool_], chunks: int) -> Trace:
        """Return the trace of one step from the initial state."""
        return self.step(self.start(), inputs, counted, chunks)[0]


def certify(model: Any, inputs: Any, *, properties: Sequence[Property] = PROPERTIES, **options: Any) -> Certificate:
    """Test which properties a model's outputs and gradients have, bit for bit.

    Args:
        model: A torch module or function of tensors; for JAX a pair (function, variables).
        inputs: Tensor or array [examples, tokens, ...], at least 2 x 2. The first output of the model must have the
            shape [examples, tokens, ...].
        properties: Properties to test: "causal", "batch-invariant", "padding-invariant", "mesh-invariant",
            "chunk-invariant", "idempotent", "replayable".
        **options: Options of `fp8_common.torch.certify.subject` or `fp8_common.jax.certify.subject`.

    Returns:
        Result of each property.

    Raises:
        Fp8Error: If a property is unknown or the inputs have another form.
    """
    framework = "jax" if isinstance(model, tuple) else "torch"
    return ask(importlib.import_module(f"fp8_common.{framework}.certify").subject(model, inputs, **options), properties)


def ask(subject: Subject, properties: Sequence[Property] = PROPERTIES) -> Certificate:
    """Test the properties of a subject; see `certify`."""
    check(properties)
    if subject.inputs.ndim < 2 or min(subject.inputs.shape[:2]) < 2:
        raise Fp8Error(f"inputs must be [examples, tokens, ...], at least 2 of each, got {subject.inputs.shape}.")
    return {name: _TESTS[name](subject) for name in properties}


def check(properties: Sequence[str]) -> None:
    """Raise for unknown properties.

    Raises:
        Fp8Error: If a property is not in `PROPERTIES`.
    """
    if unknown := [name for name in properties if name not in PROPERTIES]:
        raise Fp8Error(f"Properties are {', '.join(PROPERTIES)}, got {', '.join(map(repr, unknown))}.")


def casts_of(recipe: Recipe) -> dict[str, Cast]:
    """Return the casts of a recipe, by operand.

    Delayed casts use the scale of the amax of the values themselves.
    """
    names = ("input", "weight", "grad_output")
    return {name: cast_of(getattr(recipe, name)) for name in names if getattr(recipe, name).enabled}


def cast_of(recipe: CastRecipe) -> Cast:
    """Return a function that quantizes and dequantizes a matrix in NumPy.

    Its results are the values, scales and codes of a matrix [rows, columns].
    """
    block = None if recipe.granularity == "rowwise" else BLOCKS[recipe.granularity]

    def cast(x: NDArray[Any]) -> Sequence[NDArray[Any]]:
        exact = x.astype(np.float32)
        axis = -1 if recipe.granularity == "rowwise" else None
        top = amax(exact, axis, keepdims=True) if block is None else block_amax(exact, block)
        scale = amax_to_scale(top, recipe.fp8_format, recipe.policy)
        if recipe.static_scale is not None:
            scale = np.full_like(scale, recipe.static_scale)
        each = scale if block is None else expand_blocks(scale, block, x.shape)
        codes = quantize(x, each, recipe.fp8_format)
        return dequantize(codes, each, recipe.fp8_format, x.dtype), scale, codes

    return cast


RULES = {
    "TE current scaling": CastRecipe(policy=te_current()),
    "TE current scaling, powers of two": CastRecipe(policy=te_current(pow2=True)),
    "TE delayed scaling": CastRecipe(policy=te_delayed(history=0)),
    "TE MX": CastRecipe(granularity="mx", policy=mx("rceil")),
    "MX, stable scales": CastRecipe(granularity="mx", policy=mx("stable")),
}
"""Casts of other libraries, by name, whose layers cannot be run. They are tested for "idempotent" only."""


def rows(properties: Sequence[Property] = PROPERTIES) -> Iterator[tuple[str, Callable[[], Certificate]]]:
    """Yield names and certificate functions for all installed packages."""
    for report in discover(detect()):
        if report.info is not None and report.info.certify is not None:
            module, _, name = report.info.certify.partition(":")
            yield from getattr(importlib.import_module(module), name)(properties)
    if "idempotent" in properties:
        for name, rule in RULES.items():
            casts = {"cast": cast_of(rule)}
            certified = Subject(inputs=np.zeros((2, 2)), start=dict, step=lambda *_: ({}, dict), casts=casts)
            yield name, functools.partial(ask, certified, ["idempotent"])


def from_file(target: str, properties: Sequence[Property] = PROPERTIES) -> Certificate:
    """Test the model of a factory function in a file.

    Args:
        target: "FILE.py:factory". The factory returns (model, inputs), or for JAX (function, variables, inputs).
        properties: Properties to test.

    Raises:
        Fp8Error: If the file or the function does not exist.
    """
    *model, inputs = _factory(target)()
    if len(model) == 2:
        return certify(tuple(model), inputs, properties=properties)
    build = functools.partial(_model, target) if hasattr(model[0], "state_dict") else None
    return certify(model[0], inputs, properties=properties, build=build)


def _model(target: str) -> Any:
    return _factory(target)()[0]


def _factory(target: str) -> Callable[[], Any]:
    path, _, name = target.rpartition(":")
    if not Path(path).is_file():
        raise Fp8Error(f"There is no file {path or target!r}. Pass a factory as FILE.py:function.")
    spec: Any = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    # Registered under its name, so that its definitions can be pickled.
    sys.modules.setdefault(module.__name__, module)
    spec.loader.exec_module(module)
    if not callable(member := getattr(module, name, None)):
        raise Fp8Error(f"{path} has no function {name!r}.")
    return member


def example() -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """Return inputs [4, 4, 16] and two weights [16, 16].

    The inputs are integers, far larger ones in the last two examples. Each row and each column of a weight has one
    power of two. No FP8 matmul covers the range of the inputs, but float32 computes all sums exactly.
    """
    drawn = np.random.default_rng(1)
    x = drawn.integers(-3, 4, (4, 4, 16)).astype(np.float32)
    x[2:] *= 2.0**17
    powers = [np.diag(drawn.choice([-2.0, -1.0, 1.0, 2.0], 16))[drawn.permutation(16)] for _ in range(2)]
    return x, {name: weight.astype(np.float32) for name, weight in zip(("up", "down"), powers, strict=True)}


def difference(
    first: Trace, other: Trace, compared: NDArray[np.bool_] | None = None, gradients: bool = True
) -> PropertyResult | None:
    """Return the first difference of two traces as a "no", or None.

    NaN equals NaN.

    Args:
        first: Trace.
        other: Trace with the same layers.
        compared: bool [examples, tokens]: outputs to compare. Other outputs, and outputs without a token axis, may
            differ. None compares all outputs.
        gradients: Whether to compare gradients.
    """
    for layer, a in first.items():
        b, selected = other[layer], None
        if layer.endswith(GRADIENT):
            if not gradients:
                continue
        elif compared is not None:
            if a.shape[:1] == (compared.size,):  # tokens of all examples in one dimension
                a, b = a.reshape(*compared.shape, *a.shape[1:]), b.reshape(*compared.shape, *a.shape[1:])
            if a.shape[:2] != compared.shape:
                continue
            selected = compared.reshape(*compared.shape, *(1,) * (a.ndim - 2))
        if a.shape != b.shape:
            return PropertyResult(result="no", reason=f"{layer} is {a.shape}, and then {b.shape}", layer=layer)
        bits = f"u{a.dtype.itemsize}"
        differs = (a.view(bits) != b.view(bits)) & ~(np.isnan(a) & np.isnan(b))
        differs = differs if selected is None else differs & selected
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            return PropertyResult(
                result="no", reason=f"{layer}{list(at)} is {a[at]}, and then {b[at]}", layer=layer, output=at
            )
    return None


def table(rows: Mapping[str, Certificate], properties: Sequence[Property] = PROPERTIES) -> str:
    """Return certificates as a Markdown table with a row for each name."""
    lines = [("", *properties), ("---",) * (1 + len(properties))]
    lines += [(name, *(str(certificate.get(each, "-")) for each in properties)) for name, certificate in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def engines(rows: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield sentences about the rows whose outputs an inference engine can reproduce.

    An engine runs other batches, and does not have later tokens.
    """
    needed = "causal", "batch-invariant"
    tested = {name: certificate for name, certificate in rows.items() if {*needed} <= certificate.keys()}
    results = {name: [str(certificate[each]) for each in needed] for name, certificate in tested.items()}
    able = [name for name, words in results.items() if {"no", "-"}.isdisjoint(words)]
    unable = [name for name, words in results.items() if "no" in words]
    if able:
        yield f"An engine that computes alike can give the outputs of: {', '.join(able)}."
    if unable:
        yield f"It cannot give those of: {', '.join(unable)}. They depend on the batch or on later tokens."


def explanations(rows: Mapping[str, Certificate]) -> Iterator[str]:
    """Yield a line for each result with a reason, "no" or "untested"."""
    for name, certificate in rows.items():
        yield from (
            f"{name}, {each}: {answer.result}: {answer.reason}."
            for each, answer in certificate.items()
            if answer.reason
        )


def _changed(x: NDArray[Any], strength: float) -> NDArray[Any]:
    if x.dtype.kind in "iu":
        top = x.max()
        return np.asarray((x + 1) % (top + 1) if strength == 1 else top - x, x.dtype)
    return (x.astype(np.float32) + np.float32(strength) * (1 + abs(x.astype(np.float32)))).astype(x.dtype)


def _depends(
    subject: Subject, free: NDArray[np.bool_], compared: NDArray[np.bool_], gradients: bool
) -> PropertyResult | None:
    """Find a small change of `free` tokens that affects `compared` tokens.

    Returns the difference of results as a "no", or None if no tested change has an effect.
    """
    x = subject.inputs
    base = subject.run(x, compared, 1)

    def with_change(elements: NDArray[np.int64], strength: float) -> tuple[PropertyResult | None, NDArray[Any]]:
        changed = x.copy().reshape(-1)
        changed[elements] = _changed(x, strength).reshape(-1)[elements]
        trace = subject.run(changed.reshape(x.shape), compared, 1)
        return difference(base, trace, compared, gradients), changed

    elements = np.flatnonzero(np.broadcast_to(free.reshape(*free.shape, *(1,) * (x.ndim - 2)), x.shape))
    for strength in STRENGTHS[: 2 if x.dtype == np.float16 else None]:
        result, changed = with_change(elements, strength)
        if result is None:
            continue
        # Bisection: halve the changed elements, then the size of the change, as long as results still differ.
        while len(elements) > 1:
            halves = [(half, *with_change(half, strength)) for half in np.array_split(elements, 2)]
            if (smaller := next((half for half in halves if half[1] is not None), None)) is None:
                break
            elements, result, changed = smaller
        while x.dtype.kind not in "iu" and strength > 2.0**-10:
            weaker, moved = with_change(elements, strength / 2)
            if weaker is None:
                break
            strength, result, changed = strength / 2, weaker, moved
        at = tuple(int(i) for i in np.unravel_index(elements[0], x.shape))
        more = f" and {len(elements) - 1} more" if len(elements) > 1 else ""
        why = f"with input{list(at)}{more} {x[at]} -> {changed[elements[0]]}, {result.reason}"
        return dataclasses.replace(result, reason=why, input=at)
    return None


def _causal(subject: Subject) -> PropertyResult:
    token = np.broadcast_to(np.arange(subject.inputs.shape[1]), subject.inputs.shape[:2])
    for last in range(subject.inputs.shape[1] - 1):
        if result := _depends(subject, token > last, token <= last, gradients=False):
            return result
    return PropertyResult(result="yes")


def _batch(subject: Subject) -> PropertyResult:
    other = np.zeros(subject.inputs.shape[:2], bool)
    other[1:] = True
    return _depends(subject, other, ~other, gradients=True) or PropertyResult(result="yes")


def _padding(subject: Subject) -> PropertyResult:
    padding = np.zeros(subject.inputs.shape[:2], bool)
    padding[:, -max(1, padding.shape[1] // 4) :] = True
    return _depends(subject, padding, ~padding, gradients=True) or PropertyResult(result="yes")


def _chunks(subject: Subject) -> PropertyResult:
    examples = len(subject.inputs)
    everything = np.ones(subject.inputs.shape[:2], bool)
    whole = subject.run(subject.inputs, everything, 1)
    for chunks in (n for n in range(2, examples + 1) if examples % n == 0):
        if result := difference(whole, subject.run(subject.inputs, everything, chunks)):
            return dataclasses.replace(result, reason=f"in {chunks} micro-batches {result.reason}")
    return PropertyResult(result="yes")


def _mesh(subject: Subject) -> PropertyResult:
    if subject.meshes is None:
        return PropertyResult(result="untested", reason="no mesh of processes for this framework")
    try:
        traces = dict(subject.meshes())
    except Fp8Error as error:
        return PropertyResult(result="untested", reason=str(error).rstrip("."))
    first = traces.pop(next(iter(traces)))
    for mesh, trace in traces.items():
        if result := difference(first, trace):
            return dataclasses.replace(result, reason=f"on {mesh} {result.reason}")
    return PropertyResult(result="yes")


def _replay(subject: Subject) -> PropertyResult:
    if subject.reload is None:
        return PropertyResult(result="untested", reason="the subject has no state to save")
    everything = np.ones(subject.inputs.shape[:2], bool)

    def two_steps(state: Any, first: int) -> tuple[Trace, Any]:
        traces: dict[str, NDArray[Any]] = {}
        for number in (first, first + 1):
            trace, advance = subject.step(state, subject.inputs, everything, 1)
            state = advance()
            # A prefix, because the suffix of a name marks gradients.
            traces |= {f"step {number}: {layer}": value for layer, value in trace.items()}
        return traces, state

    _, middle = two_steps(subject.start(), 1)
    loaded = subject.reload(middle)
    result = difference(two_steps(middle, 3)[0], two_steps(loaded, 3)[0])
    return (
        PropertyResult(result="yes")
        if result is None
        else dataclasses.replace(result, reason=f"after a load {result.reason}")
    )


def _idempotent(subject: Subject) -> PropertyResult:
    if not subject.casts:
        return PropertyResult(result="untested", reason="no casts are known; pass casts={name: function}")
    drawn = np.random.default_rng(0)
    # The first numbers have short mantissas, so that a counterexample is short.
    tops = np.concatenate([np.arange(128, 512) / 16, np.exp2(drawn.uniform(0, 6, 200))]).astype(np.float32)
    for layer, cast in subject.casts.items():
        for top in tops:
            x = np.zeros((2, 32), np.float32)
            x[0] = top / 2.0 ** np.arange(32)
            first = cast(x)
            for number, (a, b) in enumerate(zip(first, cast(np.asarray(first[0], x.dtype)), strict=True)):
                if result := difference({layer: np.asarray(a)}, {layer: np.asarray(b)}):
                    what = ("value", "scale", "code")[min(number, 2)]
                    why = f"with the largest value {top}, the {what} {result.reason}"
                    return dataclasses.replace(result, reason=why, input=(0, 0))
    return PropertyResult(result="yes")


_TESTS: dict[str, Callable[[Subject], PropertyResult]] = {
    "causal": _causal,
    "batch-invariant": _batch,
    "padding-invariant": _padding,
    "mesh-invariant": _mesh,
    "chunk-invariant": _chunks,
    "idempotent": _idempotent,
    "replayable": _replay,
}
