"""Which folders a save may replace: its own older ones."""

from pathlib import Path

from fp8_common._errors import Fp8Error


def check_replaceable(target: Path, mark: str, kind: str) -> None:
    """Refuse a path where something else lies than an older folder of the same kind, or an empty one.

    Args:
        target: Where a folder is to appear.
        mark: A file that all folders of this kind hold.
        kind: What the folder is, for the error.

    Raises:
        Fp8Error: There is a file, or a folder with other things in it.
    """
    if not target.exists() or (target / mark).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise Fp8Error(f"{target} exists and is no {kind}, so it is not replaced. Choose another path, or remove it.")
