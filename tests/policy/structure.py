"""Counts of the packages' structure, as a command that prints JSON or records it in benchmarks/results/structure.json.

    python -m tests.policy.structure                                    print the counts of this checkout
    python -m tests.policy.structure --record after                     record them
    python -m tests.policy.structure --root FOLDER --record before      record those of another checkout

Lines are all lines of Python files, comments and empty ones included; code lines hold a token that is neither comment
nor docstring. Demos are the packages' folders `demo` and the folder `demos` of the checkout, their tests excepted.
`steady_forward.py` says which forward is counted; its figures need an environment that has torch.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.repository import ROOT, Package, packages, tracked_files
from tests.policy.import_graph import circles, import_graph, module_name
from tests.policy.style_budget import measure

RESULT = ROOT / "benchmarks" / "results" / "structure.json"
PLUGIN_INTERFACE = ("fp8_common.plugin", "fp8_common.torch.plugin", "fp8_common.jax.plugin")
MOST_PLUGIN_NAMES = 25
MOST_CALLS = 150
"""Calls of Python functions in the steady forward of one weight."""


def structure(root: Path) -> dict[str, Any]:
    """Return all counts of a checkout."""
    public = public_names(root)
    found = circles(import_graph(root))
    return {
        "commit": commit(root),
        "source": source_lines(root),
        "wheels": {package.name: wheel_lines(package, root) for package in packages(root).values()},
        "public_names": {name: len(names) for name, names in public.items()},
        "plugin_interface": {name: len(public[name]) for name in PLUGIN_INTERFACE if name in public},
        "circles": {"count": len(found), "shortest": found},
        "steady_forward": steady_forward(root)["figures"],
    }


def commit(root: Path) -> str:
    """Return the commit of a checkout, with a plus sign if files differ from it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


def source_lines(root: Path) -> dict[str, dict[str, int]]:
    """Return modules, lines and code lines with and without demos."""
    files = [path for package in packages(root).values() for path in package.source.rglob("*.py")]
    demos = [path for path in (root / "demos").rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    plain = [path for path in files if "demo" not in path.relative_to(root).parts]
    return {"with_demos": lines_of(files + demos, root), "without_demos": lines_of(plain, root)}


def lines_of(files: list[Path], root: Path) -> dict[str, int]:
    """Return the number of files, of their lines and of their code lines."""
    measured = measure(files, root)
    return {"modules": len(files), "lines": sum(measured.files.values()), "code_lines": measured.code}


def wheel_lines(package: Package, root: Path) -> dict[str, int]:
    """Return the Python files and lines that hatch puts into a package's wheel.

    Raises:
        ValueError: The wheel's configuration selects files in a way that this count does not know.
    """
    target = package.config["tool"]["hatch"]["build"]["targets"]["wheel"]
    if target != {"packages": [f"src/{package.module}"]}:
        raise ValueError(f"{package.name} selects the files of its wheel by {target}: teach wheel_lines to read that.")
    # hatch takes the whole folder but for what git ignores
    files = [path for path in tracked_files(root) if path.suffix == ".py" and path.is_relative_to(package.source)]
    counted = lines_of(files, root)
    return {"modules": counted["modules"], "lines": counted["lines"]}


def public_names(root: Path) -> dict[str, list[str]]:
    """Return `__all__` of every module that has one and whose dotted name has no underscored part."""
    found = {}
    for package in packages(root).values():
        for path in sorted(package.source.rglob("*.py")):
            name = module_name(path, package.folder / "src")
            if not any(part.startswith("_") for part in name.split(".")):
                declared = declared_names(ast.parse(path.read_text()))
                found |= {name: declared} if declared is not None else {}
    return found


def declared_names(tree: ast.Module) -> list[str] | None:
    """Return what a module assigns to `__all__`, which must be a literal; None if it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def steady_forward(root: Path) -> dict[str, Any]:
    """Return what `steady_forward.py` prints about the packages of a checkout."""
    sources = [str(package.folder / "src") for package in packages(root).values()]
    program = Path(__file__).with_name("steady_forward.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"steady_forward.py failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def main() -> None:
    """Print the counts, or record them beside those that are recorded already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--record", choices=["before", "after"], help=f"write to {RESULT.relative_to(ROOT)} as this")
    options = parser.parse_args()
    counts = structure(options.root.resolve())
    if not options.record:
        print(json.dumps(counts, indent=1))
        return
    recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    recorded[options.record] = counts
    RESULT.write_text(
        json.dumps({key: recorded[key] for key in ("before", "after") if key in recorded}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
