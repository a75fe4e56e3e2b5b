"""The report of `fp8 compare`: the tensors that two checkpoints for serving engines decode differently."""

from typing import Any

from fp8_common._cli_text import number, table
from fp8_common._served import differences, read_for_serving


def facts(first: str, second: str) -> dict[str, Any]:
    """Return how two checkpoints differ.

    Args:
        first: A folder or a file, as `read_for_serving` takes it.
        second: Another one.

    Raises:
        Fp8Error: One of them cannot be read.
    """
    a, b = read_for_serving(first), read_for_serving(second)
    codes = [one.notes.get("codes") for one in (a, b)]
    return {"tensors": len({*a, *b}), "codes": codes, "different": list(differences(a, b))}


def text(found: dict[str, Any]) -> str:
    """Return `facts` for people."""
    different = found["different"]
    if not different:
        return f"{found['tensors']} tensors decode to the same values."
    head = ("tensor", "codes differing", "values differing", "max abs", "max rel", "scales")
    rows = [head, *(_row(entry) for entry in different)]
    return "\n".join([*table(rows), f"{len(different)} of {found['tensors']} tensors decode differently."])


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    if "problem" in entry:
        return entry["tensor"], "", "", "", "", entry["problem"]
    codes = "-" if entry["codes_differing"] is None else f"{entry['codes_differing']} of {entry['elements']}"
    one, other = entry["scales"]
    rule = one if one == other else f"{one}; {other}"
    largest = number(entry["max_abs"]), number(entry["max_rel"])
    return entry["tensor"], codes, str(entry["values_differing"]), *largest, rule
