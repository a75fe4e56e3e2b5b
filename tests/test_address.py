"""The repository's address: one setting, `repo_url` of mkdocs.yml, which `.ci/address` writes wherever it stands."""

import re
import shutil
import subprocess

from tests.helpers.repository import ROOT, packages, tracked_files

REPOSITORY, SITE = (
    re.search(rf"^{key}: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    for key in ("repo_url", "site_url")
)
HOLDERS = ["README.md", "CITATION.cff", "docs/index.md", "docs/install.md", "mkdocs.yml"]
WITHOUT_SITE = ("docs/index.md", "docs/install.md")
HOLDERS += [str((package.folder / "pyproject.toml").relative_to(ROOT)) for package in packages().values()]


def test_every_place_holds_the_address_of_the_setting():
    assert [name for name in HOLDERS if REPOSITORY not in (ROOT / name).read_text()] == []
    assert [name for name in HOLDERS if name not in WITHOUT_SITE and SITE not in (ROOT / name).read_text()] == []
    for package in packages().values():
        assert package.config["project"]["urls"]["Repository"] == REPOSITORY
    texts = {str(path.relative_to(ROOT)): path.read_bytes().decode(errors="ignore") for path in tracked_files()}
    found = {(name, url) for name, text in texts.items() for url in re.findall(r"git\+(https://[\w.-]+[\w./-]*)", text)}
    assert {url for _, url in found} == {REPOSITORY}, found


def test_the_script_writes_another_address_everywhere_and_again(tmp_path):
    for name in HOLDERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    for given, pages in (
        ("https://github.com/someone/fp8.git", "https://someone.github.io/fp8/"),
        ("https://code.example.org/team/fp8-plugins/", "https://team.code.example.org/fp8-plugins/"),
    ):
        subprocess.run([ROOT / ".ci/address", given], cwd=tmp_path, check=True, capture_output=True)
        address = given.removesuffix("/").removesuffix(".git")
        for name in HOLDERS:
            text = (tmp_path / name).read_text()
            assert address in text, name
            assert pages in text or name in WITHOUT_SITE, name
            assert REPOSITORY not in text, name
            assert SITE not in text, name


def test_the_script_takes_nothing_but_an_address(tmp_path):
    done = subprocess.run([ROOT / ".ci/address", "fp8"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "https://HOST/OWNER/NAME" in done.stderr
