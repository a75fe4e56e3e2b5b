"""Guides are read as they are run: every one says what to install, and its blocks form one program."""

import pytest

from tests.helpers.repository import packages
from tests.pages import notebooks
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


CASES = {case.name: case for case in follow_guides.cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_everything_that_is_followed_says_what_to_install_and_is_made_of_programs(case):
    assert case.wanted
    for code in case.programs:
        compile(code, case.name, "exec")


def test_guides_and_notebooks_are_followed():
    assert {path.name for path in PAGES if follow_guides.program(path.read_text())} <= CASES.keys()
    assert {path.name for path in notebooks.NOTEBOOKS} <= CASES.keys()
    assert {"from-torchao.md", "from-flax.md", "from-transformer-engine.md", "from-deepspeed.md"} <= CASES.keys()


def test_programs_that_need_a_gpu_are_left_out():
    page = "```diff\n-import deepspeed\n+import torch\n```\n"
    assert follow_guides.runnable(page) == ["import torch\n"]


def test_a_case_without_an_installation_is_told(tmp_path):
    case = follow_guides.Case("guide.md", [], ["1"])
    assert list(follow_guides.complaints(case, tmp_path)) == ["guide.md has programs and no `$ pip install` line"]
