"""The subset of a matrix of cases that short runs take: pairs, or each value once, in few cases."""

import itertools

import pytest

from tests.helpers.repository import ROOT


@pytest.fixture(scope="session")
def subsets(pytestconfig):
    """The root conftest, which cannot be imported by name."""
    return pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))


@pytest.fixture(scope="session")
def pairwise(subsets):
    return subsets.pairwise


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (4, 3, 5, 2), (3, 3, 3, 3), (2, 2, 2, 2, 2, 7), (3, 1, 2)])
def test_any_two_values_meet(pairwise, sizes):
    axes = [[f"{axis}-{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    cases = list(pairwise(axes))
    for first, second in itertools.combinations(axes, 2):
        met = {pair for case in cases for pair in itertools.permutations(case, 2)}
        assert set(itertools.product(first, second)) <= met
    assert {value for case in cases for value in case} == set(itertools.chain(*axes))
    assert len(cases) == len(set(cases))


def test_the_subset_is_small_and_always_the_same(pairwise):
    axes = [range(4)] * 6
    cases = list(pairwise(axes))
    assert len(cases) <= 40
    assert cases == list(pairwise(axes))


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (4, 3, 5, 2), (2, 7, 2)])
def test_each_value_occurs_in_as_few_cases_as_possible(subsets, sizes):
    axes = [[f"{axis}-{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    cases = list(subsets.each(axes))
    assert {value for case in cases for value in case} == set(itertools.chain(*axes))
    assert len(cases) == max(sizes)


@pytest.mark.matrix("each", left=["a", "b", "c"], right=[1, 2])
def test_the_marker_takes_the_smaller_subset(request, left, right, full):
    siblings = [item for item in request.session.items if item.name.startswith(request.node.originalname)]
    assert len(siblings) == (6 if full else 3)


@pytest.mark.matrix(left=["a", "b"], right=[1, 2])
def test_the_marker_gives_values_by_name(left, right, full):
    assert left in {"a", "b"}
    assert right in {1, 2}
    assert isinstance(full, bool)
