"""Every package ships its types, licence and readme, and all carry one version."""

import itertools
import re

import pytest

from tests.helpers.repository import ROOT, Package, packages

VERSION = packages()["fp8-common"].config["project"]["version"]
every_package = pytest.mark.parametrize("package", packages().values(), ids=lambda package: package.name)


def pinned(package: Package) -> dict[str, str]:
    """Return what a package asks of its siblings, its extras included."""
    project = package.config["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *itertools.chain(*extras)]
    matches = (re.fullmatch(r"(fp8-[a-z-]+)(?:\[[\w,]+\])?(.*)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in matches if match}


@every_package
def test_types_are_shipped(package):
    assert (package.source / "py.typed").is_file()


@every_package
def test_the_licence_is_a_real_copy(package):
    copy = package.folder / "LICENSE"
    assert not copy.is_symlink(), "A link ships no licence: put a copy there."
    assert copy.read_bytes() == (ROOT / "LICENSE").read_bytes()


@every_package
def test_the_readme_is_shipped(package):
    assert (package.folder / package.config["project"]["readme"]).read_text().startswith(f"# {package.name}\n")


@every_package
def test_all_packages_have_one_version(package):
    assert package.config["project"]["version"] == VERSION


@every_package
def test_siblings_are_pinned_exactly(package):
    wanted = dict.fromkeys(pinned(package), f"=={VERSION}")
    assert pinned(package) == wanted
    assert package.name == "fp8-common" or "fp8-common" in wanted


@every_package
def test_a_plugin_can_be_discovered(package):
    plugins = package.config["project"].get("entry-points", {}).get("fp8.plugins", {})
    modules = {name: target.partition(":")[0].partition(".")[0] for name, target in plugins.items()}
    expected = {} if package.name == "fp8-common" else {package.name.removeprefix("fp8-"): package.module}
    assert modules == expected


def test_the_version_stands_everywhere():
    source = (packages()["fp8-common"].source / "__init__.py").read_text()
    assert f'__version__ = "{VERSION}"' in source
    assert f"version: {VERSION}" in (ROOT / "CITATION.cff").read_text().splitlines()
    assert re.search(rf"^## \[{re.escape(VERSION)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
