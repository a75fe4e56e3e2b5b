"""Guides are read as they are run: every one says what to install, and its blocks form one program."""

import pytest

from tests.helpers.repository import packages
from tests.release import follow_guides

PAGES = sorted(follow_guides.GUIDES.glob("*.md"))
PAGE = """
```console
$ pip install "fp8-jax-owg[flax,optax]" lightning
```

=== "Tab"

    ```python
    if True:
        a = 1
    ```

```python
print(a)
```

```text
not this
```
"""


def test_folders_stand_for_the_packages_of_the_repository():
    folder = packages()["fp8-jax-owg"].folder
    assert follow_guides.installs(PAGE) == [f"{folder}[flax,optax]", "lightning"]


def test_blocks_run_in_order_and_without_their_indentation():
    assert follow_guides.program(PAGE) == "if True:\n    a = 1\n\n\nprint(a)\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_guide_says_what_to_install_and_its_blocks_are_a_program(path):
    page = path.read_text()
    code = follow_guides.program(page)
    compile(code, path.name, "exec")
    assert bool(follow_guides.installs(page)) or not code


def test_a_guide_without_an_installation_is_told(tmp_path):
    path = tmp_path / "guide.md"
    path.write_text("```python\n1\n```\n")
    assert list(follow_guides.complaints(path, tmp_path)) == ["guide.md has Python blocks and no `$ pip install` line"]
