"""Import rules: declared dependencies only, no framework unasked, no internals of another package."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.repository import ROOT, Package, packages, sources

HEAVY = ["torch", "jax", "jaxlib", "flax", "triton", "matplotlib", "rich", "hypothesis", "pytest"]
COMMON = packages()["fp8-common"]
# What each part may import beside the standard library and fp8_common; the longest prefix decides.
ALLOWED = {
    "fp8_common": {"numpy", "ml_dtypes"},
    "fp8_common/torch": {"numpy", "ml_dtypes", "torch"},
    "fp8_common/jax": {"numpy", "ml_dtypes", "jax"},
    "fp8_common/_kernels": {"triton"},
    "fp8_common/advise": {"numpy", "matplotlib"},
    "fp8_common/testing": {"numpy", "ml_dtypes", "hypothesis", "pytest"},
    "fp8_torch_fsdp": {"numpy", "torch", "fp8_common"},
    "fp8_torch_fsdp/integrations": {"torch", "fp8_common", "torchtitan", "lightning", "transformers"},
    "fp8_jax_owg": {"numpy", "jax", "fp8_common"},
    "fp8_jax_owg/linen": {"numpy", "jax", "flax", "optax", "fp8_common"},
    "fp8_jax_owg/nnx": {"numpy", "jax", "flax", "optax", "fp8_common"},
    "fp8_jax_owg/equinox": {"jax", "equinox", "fp8_common"},
    "fp8_jax_owg/optax": {"jax", "optax", "fp8_common"},
    "fp8_te_init": {"numpy", "torch", "fp8_common"},
    "fp8_te_init/te": {"torch", "fp8_common", "transformer_engine"},
}


def light_modules() -> list[str]:
    """Return the modules of fp8_common that need no framework."""
    names = (path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path, _ in sources(COMMON))
    heavy = ("fp8_common.torch", "fp8_common.jax", "fp8_common._kernels")
    return [name for name in names if not name.startswith(heavy) and not name.endswith("__main__")]


@pytest.mark.parametrize("module", light_modules())
def test_importing_loads_no_framework(module):
    code = f"import sys, json, {module}; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    allowed = {"hypothesis", "pytest"} if module.startswith("fp8_common.testing.") else set()
    assert set(json.loads(done.stdout)) <= allowed


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the imported name of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"Line {node.lineno}: imports are absolute here."
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def allowed_in(path: str) -> set[str]:
    prefix = max((prefix for prefix in ALLOWED if path.startswith(f"{prefix}/")), key=len)
    return ALLOWED[prefix]


@pytest.mark.parametrize("package", packages().values(), ids=lambda package: package.name)
def test_only_declared_dependencies_are_imported(package: Package):
    found = [
        f"{path}:{line} {module}"
        for path, tree in sources(package)
        for line, module, _ in imports(tree)
        if (top := module.partition(".")[0]) != package.module
        and top not in sys.stdlib_module_names
        and top not in allowed_in(path)
    ]
    assert found == []


@pytest.mark.parametrize("package", packages().values(), ids=lambda package: package.name)
def test_no_package_imports_the_internals_of_another(package: Package):
    siblings = {other.module for other in packages().values()} - {package.module}
    found = [
        f"{path}:{line} {module}.{name}"
        for path, tree in sources(package)
        for line, module, name in imports(tree)
        if module.partition(".")[0] in siblings
        and any(part.startswith("_") and not part.endswith("__") for part in [*module.split("."), name])
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["demos", "examples"])
def test_programs_to_copy_from_use_public_names_alone(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line} {module}.{name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, module, name in imports(ast.parse(path.read_text()))
        if module.startswith("fp8_")
        and any(part.startswith("_") and not part.endswith("__") for part in [*module.split("."), name])
    ]
    assert found == []


def test_plugins_do_not_import_the_compiler():
    """`torch.compiler.disable` as a decorator does, a second of every start; torch imports it when it is needed."""
    code = "import sys, torch.distributed.fsdp, torch.distributed.tensor; before = 'torch._dynamo' in sys.modules"
    for module in ("fp8_torch_fsdp", "fp8_te_init"):
        code += f"; import {module}; assert before or 'torch._dynamo' not in sys.modules, '{module}'"
    subprocess.run([sys.executable, "-c", code], check=True)
