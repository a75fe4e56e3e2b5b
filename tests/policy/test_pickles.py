"""No file is unpickled in a way that may run code from it."""

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.repository import ROOT, packages

FOLDERS = [*(package.source for package in packages().values()), ROOT / "benchmarks", ROOT / "demos", ROOT / "examples"]
ALLOWED = {
    # Reads the index of a checkpoint; its find_class accepts the classes of an index and nothing else.
    "fp8_common/torch/_checkpoint.py: pickle.Unpickler",
}


def unpickles(tree: ast.Module) -> Iterator[str]:
    """Yield every place where something might be unpickled without limits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"pickle.Unpickler", "pickle.load", "pickle.loads"}:
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name, settings = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
        if name == "torch.load" and settings.get("weights_only") != "True":
            yield ast.unparse(node)
        if "allow_pickle" in settings and settings["allow_pickle"] != "False":
            yield ast.unparse(node)
        if name in {"dcp_to_torch_save", "torch_save_to_dcp", "FileSystemReader"}:
            yield ast.unparse(node)


def test_nothing_is_unpickled_without_limits():
    found = {
        f"{path.relative_to(folder.parent)}: {place}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for place in unpickles(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "pickle.loads(data)",
        "class U(pickle.Unpickler): pass",
        "np.load(path, allow_pickle=True)",
        "FileSystemReader(path).read_metadata()",
    ],
)
def test_what_may_run_code_is_found(code):
    assert list(unpickles(ast.parse(code)))


@pytest.mark.parametrize("code", ["torch.load(path, weights_only=True)", "np.load(path)", "json.loads(text)"])
def test_what_may_not_is_let_through(code):
    assert not list(unpickles(ast.parse(code)))
