"""Decides that the list of mistakes fits the sources; that each is found is what session `mutants` checks."""

import pytest
from mutants import MUTANTS
from repository import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_the_right_line_stands_there_once(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.right) == 1
    assert mutant.right != mutant.wrong


def test_every_mistake_has_a_name_of_its_own():
    assert len({mutant.mistake for mutant in MUTANTS}) == len(MUTANTS) >= 25
