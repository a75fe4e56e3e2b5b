"""Facts about the repository that no linter knows: packaging, imports, CI, and how its tests are chosen and counted."""

import ast
import itertools
import json
import re
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT, packages, tracked_files

VERSION = (ROOT / "CITATION.cff").read_text().partition("\nversion: ")[2].splitlines()[0]
every_package = pytest.mark.parametrize("package", packages().values(), ids=packages())


# ---------------------------------------------------------------- packages


@every_package
def test_a_package_ships_types_licence_and_readme_and_pins_its_siblings(package):
    project = package.config["project"]
    assert (package.source / "py.typed").is_file()
    licence = package.folder / "LICENSE"
    assert not licence.is_symlink(), "A link ships no licence: put a copy there."
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (package.folder / project["readme"]).read_text().startswith(f"# {package.name}\n")
    # what the build backend reads
    assert f'\n__version__ = "{VERSION}"\n' in (package.source / "__init__.py").read_text()
    extras = project.get("optional-dependencies", {}).values()
    siblings = [one for one in itertools.chain(project["dependencies"], *extras) if one.startswith("fp8-")]
    assert [one for one in siblings if not one.endswith(f"=={VERSION}")] == []
    assert package.name == "fp8-common" or any(one.startswith("fp8-common") for one in siblings)


def test_pages_and_changelog_have_the_version_of_the_packages():
    assert f"copyright: fp8 plugins {VERSION}, Apache-2.0" in (ROOT / "mkdocs.yml").read_text()
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_knows_the_machine_it_was_written_on():
    place = re.compile(r"""(?:^|[\s"'=:(\[])/(?:work|root|home|Users|opt|mnt)/[\w.-]""", re.MULTILINE)
    index = re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|devpi|artifactory)\b|index-url[= ]+(?:https?:|file:|/)")
    texts = {path: path.read_bytes().decode(errors="ignore") for path in tracked_files()}
    assert {path: found[0] for path, text in texts.items() if (found := place.search(text) or index.search(text))} == {}
    assert [path for path in texts if path.is_symlink() or path.stat().st_size > 2_000_000] == []


def test_actions_are_pinned_by_commit_and_ci_runs_the_command_of_the_readme():
    workflows = "\n".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    actions = re.findall(r"uses: (\S+)", workflows)
    assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    steps = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("python ")]
    assert steps == ['python -m pip install "nox[uv]" && python -m nox']
    readme = (ROOT / "README.md").read_text()
    assert all(f"\n{command}" in readme for command in steps[0].split(" && "))


def test_a_release_publishes_every_package_from_an_environment_of_its_own():
    """An index takes one publisher that waits for its project for each repository, workflow and environment."""
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    names = re.search(r"package: \[(.*)\]", workflow)[1].split(", ")
    assert sorted(names) == sorted(package.module for package in packages().values())
    assert "environment: release-${{ matrix.package }}" in workflow
    assert [name for name in names if f"release-{name}" not in (ROOT / "docs/develop.md").read_text()] == []


# ---------------------------------------------------------------- imports


def test_importing_fp8_common_loads_no_framework():
    heavy = ["torch", "jax", "jaxlib", "flax", "triton", "matplotlib", "hypothesis", "pytest"]
    source = packages()["fp8-common"].source
    files = [path.relative_to(source.parent).with_suffix("") for path in source.rglob("*.py")]
    light = [
        path.parts for path in files if path.parts[1] not in ("torch", "torch_layers", "jax", "_kernels", "testing")
    ]
    names = sorted(".".join(parts) for parts in light if parts[-1] not in ("__main__", "__init__"))
    code = f"import sys, json, importlib; [importlib.import_module(name) for name in {names}]"
    code += f"; print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_packages_do_not_import_the_compiler():
    """`torch.compiler.disable` as a decorator does, a second of every start; torch imports it when it is needed."""
    code = "import sys, torch.distributed.fsdp, torch.distributed.tensor; before = 'torch._dynamo' in sys.modules"
    lazy = ("fp8_common.torch_layers.sharding.replaced", "fp8_common.torch_layers.sharding.gradient_messages")
    for module in (*lazy, "fp8_torch_fsdp", "fp8_te_init"):
        code += f"; import {module}; assert before or 'torch._dynamo' not in sys.modules, '{module}'"
    subprocess.run([sys.executable, "-c", code], check=True)


def imports(path):
    """Yield module and name of every import of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def is_internal(module, name):
    return any(part.startswith("_") and not part.endswith("__") for part in [*module.split("."), name])


def test_internals_of_other_packages_are_not_imported():
    folders = {package.module: package.source for package in packages().values()} | {"examples": ROOT / "examples"}
    found = {
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for own, folder in folders.items()
        for path in folder.rglob("*.py")
        for module, name in imports(path)
        if module.partition(".")[0] in folders.keys() - {own} and is_internal(module, name)
    }
    assert found == set()


# ---------------------------------------------------------------- which tests run, and where


@pytest.mark.parametrize("sizes", [(4,), (4, 3, 5, 2), (4, 4, 4, 4, 4, 4)])
def test_pairs_of_values_meet_in_few_cases_and_each_value_in_fewer(pytestconfig, sizes):
    subsets = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))  # it cannot be imported by name
    axes = [[f"{axis}-{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    pairs, each = list(subsets.pairwise(axes)), list(subsets.each(axes))
    met = {pair for case in pairs for pair in itertools.combinations(case, 2)}
    assert all(set(itertools.product(*pair)) <= met for pair in itertools.combinations(axes, 2))
    assert len(pairs) == len(set(pairs)) <= 40
    assert {value for case in each for value in case} == set(itertools.chain(*axes))
    assert len(each) == max(sizes)
