"""Decides that the list of mistakes fits the sources; that each is found is what session `mutants` checks."""

import pytest

from tests.helpers.repository import ROOT, packages
from tests.mutants.mutants import CONFORMANCE, MUTANTS, TE_FORMULAS_COLUMN


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_the_right_line_stands_there_once(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.right) == 1
    assert mutant.right != mutant.wrong


def test_every_mistake_has_a_name_of_its_own():
    assert len({mutant.mistake for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_the_list_covers_every_package():
    files = " ".join(mutant.file for mutant in MUTANTS)
    assert [name for name, package in packages().items() if f"{package.folder.relative_to(ROOT)}/" not in files] == []


@pytest.mark.parametrize(
    "tests",
    [
        *(f"{CONFORMANCE} -k {one}" for one in ("torch-eager", "torch.compile", "jax-eager", "jax-jit")),
        f"{CONFORMANCE} -k Triton-interpreter",
        TE_FORMULAS_COLUMN,
    ],
)
def test_every_column_of_the_matrix_must_find_a_mistake_by_itself(tests):
    assert any(mutant.tests == tests for mutant in MUTANTS)


def test_triton_interprets_where_a_kernel_is_wrong():
    wrong = {mutant.mistake for mutant in MUTANTS if "/kernels/" in mutant.file}
    assert wrong == {mutant.mistake for mutant in MUTANTS if mutant.interpreted}


def test_the_documents_list_every_mistake():
    page = (ROOT / "docs/develop/mutants.md").read_text()
    assert [mutant.mistake for mutant in MUTANTS if f"| {mutant.mistake} | `{mutant.file}` |" not in page] == []
    assert page.count("\n| ") == len(MUTANTS) + 1
