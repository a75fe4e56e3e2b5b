"""What a session hands on to pytest of the arguments after `--`."""

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def named_or(paths: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return pytest's arguments: as they are if one of them names a file or folder, else with `paths` before them."""
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments if argument[:1] != "-")
    return [*arguments] if named else [*paths, *arguments]
