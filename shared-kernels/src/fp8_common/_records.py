"""`Record`: base of the settings dataclasses, with checks and conversion to and from dictionaries.

A dictionary holds only what strict JSON can carry; infinity is the string "inf". Reading refuses unknown keys, so
that a setting is never dropped in silence.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

from fp8_common._errors import Fp8Error

# The types of a JSON value that each annotation accepts: JSON does not tell 1.0 from 1.
_KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


class Record:
    """Base of the settings dataclasses: `to_dict`, `from_dict` and the check of every `Literal` field."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return every field as strict JSON can carry it; `from_dict` undoes it."""
        fields = dataclasses.fields(self)  # pyrefly: ignore[bad-argument-type]
        return {field.name: _dump(getattr(self, field.name)) for field in fields}

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
        missing = [name for name, field in fields.items() if _required(field) and name not in data]
        if missing:
            raise Fp8Error(f"{cls.__name__} needs {', '.join(map(repr, missing))}, got {', '.join(data) or 'nothing'}.")
        return cls(**{key: _load(fields[key].type, value, f"{cls.__name__}.{key}") for key, value in data.items()})

    def check_choices(self) -> None:
        """Refuse a value that its `Literal` annotation does not list.

        Raises:
            Fp8Error: Naming the field, the value and the choices.
        """
        for field in dataclasses.fields(self):  # pyrefly: ignore[bad-argument-type]
            if typing.get_origin(field.type) is Literal:
                _load(field.type, getattr(self, field.name), field.name)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dump(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _load(annotation: Any, value: Any, where: str) -> Any:
    """Return `value` in the type of `annotation`, or raise."""
    # Optional fields come first: `X | None` is no class, which the tests below need.
    if isinstance(annotation, types.UnionType):
        members = typing.get_args(annotation)
        return None if value is None and type(None) in members else _load(members[0], value, where)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if not isinstance(value, str) or value not in choices:
            raise Fp8Error(f"{where} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        return value
    if issubclass(annotation, Record):
        return annotation.from_dict(value)
    if annotation is float and value in ("inf", "-inf"):
        return float(value)
    # bool is a subclass of int, so True would pass for a number.
    if not isinstance(value, _KINDS[annotation]) or (isinstance(value, bool) and annotation is not bool):
        raise Fp8Error(f"{where} must be of type {annotation.__name__}, got {value!r}.")
    try:
        # Makes the float that a field wants of an integer, which JSON may have written for it.
        return annotation(value)
    except OverflowError as error:
        raise Fp8Error(f"{where} must be a number that a float can hold, got {value!r}.") from error
