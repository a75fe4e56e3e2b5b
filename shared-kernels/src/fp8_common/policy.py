"""`ScalePolicy`, the rule for scales, and `Record`, the base of settings.

The dictionary of a record has values of strict JSON only; infinity is the string "inf". Reading a dictionary raises for
unknown keys, so that no setting is dropped silently.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from fp8_common.errors import Fp8Error


class Record:
    """Base class of settings: dataclasses that convert to dictionaries and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of strict JSON values for `from_dict`."""
        return dataclasses.asdict(self, dict_factory=_without_infinity)  # pyrefly: ignore[bad-argument-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a record from the dictionary of `to_dict`.

        Omitted fields get their defaults.

        Raises:
            Fp8Error: If a key is unknown or missing, or a value has the wrong type or is not allowed.
        """
        if not isinstance(data, Mapping):
            raise Fp8Error(f"{cls.__name__} must be read from a dictionary, got {type(data).__name__}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # pyrefly: ignore[bad-argument-type]
        unknown = sorted(str(key) for key in data if key not in fields)
        if unknown:
            raise Fp8Error(
                f"{cls.__name__} has no field {', '.join(map(repr, unknown))}. Known fields: {', '.join(fields)}. "
                "Remove the unknown ones, or install the fp8-common version that wrote them."
            )
        missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in data]
        if missing:
            raise Fp8Error(f"{cls.__name__} needs {', '.join(map(repr, missing))}, got {', '.join(data) or 'nothing'}.")
        return cls(**{key: _load(fields[key].type, value, f"{cls.__name__}.{key}") for key, value in data.items()})

    def __repr__(self) -> str:
        """Return the call that creates the record, without default fields."""
        changed = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)  # pyrefly: ignore[bad-argument-type]
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check_choices(self) -> None:
        """Raise if a field has a value that its `Literal` annotation excludes.

        Raises:
            Fp8Error: If there is such a field; the message has its name, its value and the allowed values.
        """
        for field in dataclasses.fields(self):  # pyrefly: ignore[bad-argument-type]
            if typing.get_origin(field.type) is Literal:
                _load(field.type, getattr(self, field.name), field.name)


def _without_infinity(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: "inf" if value == math.inf else value for name, value in fields}


def _load(annotation: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the type of `annotation`, or raise."""
    # Optional fields come first: `X | None` is not a class, as the tests below require.
    if isinstance(annotation, types.UnionType):
        return None if value is None else _load(typing.get_args(annotation)[0], value, where)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if not isinstance(value, str) or value not in choices:
            raise Fp8Error(f"{where} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        return value
    if issubclass(annotation, Record):
        return annotation.from_dict(value)
    if annotation is float and value == "inf":
        return math.inf
    # JSON does not distinguish 1.0 and 1. An integer of fewer than 1024 bits does not overflow a float.
    if annotation is float and type(value) is int and value.bit_length() < 1024:
        return float(value)
    # bool is a subclass of int, so True would pass for a number.
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is not bool):
        raise Fp8Error(f"{where} must be of type {annotation.__name__}, got {value!r}.")
    return value


FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
# Within these limits, a scale and its reciprocal are normal numbers, so hardware that flushes subnormals agrees.
SCALE_MIN = 2.0**-126
MAX_EXPONENT = 100
SCALE_MAX = 2.0**MAX_EXPONENT
# Up to this magnitude of the margin, max * 2^-margin is exact in float32 for every format.
MAX_MARGIN = 16
# Up to this margin, max * 2^-margin and half of it are normal numbers in every format, which all round the same way.
MAX_STABLE_MARGIN = 13

MxMode = Literal["floor", "ceil", "even", "rceil", "stable"]
MX_MODES: tuple[MxMode, ...] = ("floor", "ceil", "even", "rceil", "stable")
HistoryAlgo = Literal["max", "most_recent"]
HISTORY_ALGOS: tuple[HistoryAlgo, ...] = ("max", "most_recent")


# With weak references a compiler notices that a policy was deleted. Otherwise it mistakes the next policy at the same
# address for the deleted one.
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, repr=False)
class ScalePolicy(Record):
    """Rule that derives a scale from an amax.

    Attributes:
        name: Name shown in errors and reports.
        margin: Headroom in powers of two: the scale maps amax to `fmt.max * 2^-margin`. An integer from -16 to 16.
        power_of_2: Whether to round the scale down to a power of two. Exact: only the mantissa is cleared.
        eps: Lower bound on amax; 0 disables it.
        zero: Scale for an amax of zero: "previous", "one" (1.0) or "eps" (`fmt.max * 2^-margin / eps`).
        nonfinite: Scale for an infinite or NaN amax: "previous" or "one".
        upper: Largest scale.
        lower: Smallest scale.
        formula: Formula of the scale. "divide": `fmt.max * 2^-margin / amax`. "e8m0": one power of two per MX block.
        mx_mode: Rounding mode of "e8m0".
        history: Length of the amax history for delayed scaling; 0 selects current scaling.
        algo: Reduction over the history: its maximum, or its newest entry.
        stable: Whether to make casts idempotent: a cast of values that came back from FP8 gives the same codes and the
            same scale. Requires current scaling, powers of two and the formula "divide".
    """

    name: str = "canonical"
    margin: int = 0
    power_of_2: bool = False
    eps: float = 0.0
    zero: Literal["previous", "one", "eps"] = "previous"
    nonfinite: Literal["previous", "one"] = "previous"
    upper: float = SCALE_MAX
    lower: float = SCALE_MIN
    formula: Literal["divide", "e8m0"] = "divide"
    mx_mode: MxMode = "rceil"
    history: int = 0
    algo: HistoryAlgo = "max"
    stable: bool = False

    def __post_init__(self) -> None:
        """Validate the fields."""
        self.check_choices()
        # `type(...) is int`, because isinstance accepts True.
        if type(self.margin) is not int or abs(self.margin) > MAX_MARGIN:
            raise Fp8Error(f"margin must be an integer from -{MAX_MARGIN} to {MAX_MARGIN}, got {self.margin!r}.")
        # A subnormal eps is zero on hardware that flushes subnormals.
        if not (self.eps == 0 or (SCALE_MIN <= self.eps < math.inf)):
            raise Fp8Error(f"eps must be 0 or a normal positive float32 (>= 2^-126), got {self.eps!r}.")
        if self.zero == "eps" and self.eps == 0:
            raise Fp8Error('zero="eps" requires eps > 0; got eps=0. Set eps, or use zero="previous".')
        if not 0 < self.lower < self.upper:
            raise Fp8Error(f"lower must be positive and below upper, got lower={self.lower!r}, upper={self.upper!r}.")
        if type(self.history) is not int or self.history < 0:
            raise Fp8Error(f"history must be 0 (current scaling) or a length, got {self.history!r}.")
        current = self.power_of_2 and self.formula == "divide" and self.upper == SCALE_MAX
        current = current and self.eps == 0 and self.history == 0
        if self.stable and not (current and 0 <= self.margin <= MAX_STABLE_MARGIN):
            raise Fp8Error(
                'stable=True requires power_of_2=True, formula="divide", upper=2^100, eps=0, history=0 and a '
                f"margin from 0 to {MAX_STABLE_MARGIN}; got power_of_2={self.power_of_2}, formula={self.formula!r}, "
                f"upper={self.upper!r}, eps={self.eps!r}, history={self.history!r}, margin={self.margin!r}. "
                'For MX use mx("stable").'
            )


CANONICAL = ScalePolicy()
"""Default policy: IEEE division, the previous scale if amax is zero, infinite or NaN, and scales in [2^-126, 2^100]."""

POWER_OF_2 = ScalePolicy(name="power_of_2", power_of_2=True)
"""Default policy with scales rounded down to powers of two."""
