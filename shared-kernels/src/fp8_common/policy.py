"""`ScalePolicy`: derives scales from amax; `Record`: base of settings.

A record's dictionary holds only values of strict JSON; infinity is the string "inf". Reading raises for unknown keys,
so that a setting is never dropped silently.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from fp8_common.errors import Fp8Error


class Record:
    """Base of settings dataclasses: `to_dict`, `from_dict`, and `Literal` checks."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field as strict JSON can carry it; `from_dict` undoes it."""
        return dataclasses.asdict(self, dict_factory=_without_infinity)  # pyrefly: ignore[bad-argument-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the record that `to_dict` described; fields left out take their defaults.

        Raises:
            Fp8Error: A key is unknown or missing, or a value has the wrong type or is not allowed.
        """
        if not isinstance(data, Mapping):
            raise Fp8Error(f"{cls.__name__} must be read from a dictionary, got {type(data).__name__}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # pyrefly: ignore[bad-argument-type]
        unknown = sorted(str(key) for key in data if key not in fields)
        if unknown:
            raise Fp8Error(
                f"{cls.__name__} does not know {', '.join(map(repr, unknown))}. "
                f"It has {', '.join(fields)}: remove the rest, or install the fp8-common that wrote it."
            )
        missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in data]
        if missing:
            raise Fp8Error(f"{cls.__name__} needs {', '.join(map(repr, missing))}, got {', '.join(data) or 'nothing'}.")
        return cls(**{key: _load(fields[key].type, value, f"{cls.__name__}.{key}") for key, value in data.items()})

    def __repr__(self) -> str:
        """Return the call that makes the record, without default fields."""
        changed = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)  # pyrefly: ignore[bad-argument-type]
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check_choices(self) -> None:
        """Raise for values that a `Literal` annotation does not list.

        Raises:
            Fp8Error: Naming the field, the value and the choices.
        """
        for field in dataclasses.fields(self):  # pyrefly: ignore[bad-argument-type]
            if typing.get_origin(field.type) is Literal:
                _load(field.type, getattr(self, field.name), field.name)


def _without_infinity(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: "inf" if value == math.inf else value for name, value in fields}


def _load(annotation: Any, value: Any, where: str) -> Any:
    """Return `value` in the type of `annotation`, or raise."""
    # Optional fields come first: `X | None` is no class, which the tests below need.
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
    # JSON does not distinguish 1.0 and 1; an integer of so many bits fits a float.
    if annotation is float and type(value) is int and value.bit_length() < 1024:
        return float(value)
    # bool is a subclass of int, so True would pass for a number.
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is not bool):
        raise Fp8Error(f"{where} must be of type {annotation.__name__}, got {value!r}.")
    return value


FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
# Within these limits a scale and its reciprocal are both normal, so hardware that flushes subnormals agrees.
SCALE_MIN = 2.0**-126
MAX_EXPONENT = 100
SCALE_MAX = 2.0**MAX_EXPONENT
# Within it max * 2^-margin is exact in float32, for every format.
MAX_MARGIN = 16
# Within it max * 2^-margin and half of it are normal numbers of every format, which round like all mantissas.
MAX_STABLE_MARGIN = 13

MxMode = Literal["floor", "ceil", "even", "rceil", "stable"]
MX_MODES: tuple[MxMode, ...] = ("floor", "ceil", "even", "rceil", "stable")
HistoryAlgo = Literal["max", "most_recent"]
HISTORY_ALGOS: tuple[HistoryAlgo, ...] = ("max", "most_recent")


# Weak references allow a compiler to see a policy's deletion: otherwise it confuses it with the next one at its
# address.
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, repr=False)
class ScalePolicy(Record):
    """Rule that derives a scale from an amax.

    Attributes:
        name: Name shown in errors and reports.
        margin: The scale aims at `fmt.max * 2^-margin`; an integer from -16 to 16.
        power_of_2: Round the scale down to a power of two, exactly, by clearing its mantissa.
        eps: An amax below this counts as this; 0 switches it off.
        zero: Scale for an amax of zero: the previous scale, 1.0, or `fmt.max / eps` ("eps").
        nonfinite: Scale for an infinite or NaN amax: the previous scale or 1.0.
        upper: Largest scale.
        lower: Smallest scale.
        formula: "divide" is `max * 2^-margin / amax`; "e8m0" is one power of two for each MX block.
        mx_mode: Rounding mode of "e8m0".
        history: Length of the amax history of delayed scaling; 0 is current scaling.
        algo: How delayed scaling reduces its history.
        stable: Take the scale from the amax of the rounded values once more, so that a cast of values that come back
            from FP8 gives the same codes and scale; for current scaling by powers of two with formula "divide".
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
        # `type(...) is int`, since isinstance would accept True.
        if type(self.margin) is not int or abs(self.margin) > MAX_MARGIN:
            raise Fp8Error(f"margin must be an integer from -{MAX_MARGIN} to {MAX_MARGIN}, got {self.margin!r}.")
        # A subnormal eps would be zero on hardware that flushes subnormals.
        if not (self.eps == 0 or (SCALE_MIN <= self.eps < math.inf)):
            raise Fp8Error(f"eps must be 0 or a normal positive float32 (>= 2^-126), got {self.eps!r}.")
        if self.zero == "eps" and self.eps == 0:
            raise Fp8Error('zero="eps" needs eps > 0; got eps=0. Set eps, or use zero="previous".')
        if not 0 < self.lower < self.upper:
            raise Fp8Error(f"lower must be positive and below upper, got lower={self.lower!r}, upper={self.upper!r}.")
        if type(self.history) is not int or self.history < 0:
            raise Fp8Error(f"history must be 0 (current scaling) or a length, got {self.history!r}.")
        current = self.power_of_2 and self.formula == "divide" and self.upper == SCALE_MAX
        current = current and self.eps == 0 and self.history == 0
        if self.stable and not (current and 0 <= self.margin <= MAX_STABLE_MARGIN):
            raise Fp8Error(
                'stable=True needs power_of_2=True, formula="divide", upper=2^100, eps=0, history=0 and a '
                f"margin from 0 to {MAX_STABLE_MARGIN}; got power_of_2={self.power_of_2}, formula={self.formula!r}, "
                f"upper={self.upper!r}, eps={self.eps!r}, history={self.history!r}, margin={self.margin!r}. "
                'For MX use mx("stable").'
            )


CANONICAL = ScalePolicy()
"""The rule of this project: IEEE division, the previous scale where amax is zero, infinite or NaN, scales in
[2^-126, 2^100]."""

POWER_OF_2 = ScalePolicy(name="power_of_2", power_of_2=True)
"""The canonical rule with power-of-two scales."""
