"""FP8 weights and masters in other processes: pickled into one, saved by one that is killed, what memory holds."""

import pickle
import sys

import pytest

from tests.helpers.fresh_processes import bits, go_on, in_fresh_process, killed_saves, memory_of, trained
from tests.helpers.primary_facts import equal
from tests.helpers.primary_models import RECIPES, step

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with a model in it, or reads /proc")


@pytest.mark.parametrize("recipe", RECIPES[1::2])
def test_model_and_optimizer_that_are_pickled_into_another_process_go_on_bit_for_bit(recipe):
    net, optimizer = trained(recipe)
    step(net, optimizer)
    returned = in_fresh_process(go_on, pickle.dumps((net, optimizer)))
    step(net, optimizer)
    assert equal(pickle.loads(returned), bits(net, optimizer))


@linux
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_at_any_line_of_a_save_leaves_a_checkpoint_to_go_on_from(tmp_path, full):
    outcomes = in_fresh_process(killed_saves, str(tmp_path), 1 if full else 40)
    print(outcomes)
    assert outcomes["unfinished"]


# small: below the 128 KiB from which glibc maps pages of their own, and well above the 9 KB of objects that a layer is
@linux
@pytest.mark.parametrize(("side", "layers"), [(2048, 4), (192, 448)], ids=["large", "many small"])
def test_the_pages_of_the_values_before_rounding_go_back_to_the_system_with_the_seeding(side, layers):
    measured = in_fresh_process(memory_of, side, layers)
    assert measured["copies"] == 2 * measured["weights"]
    assert measured["held"] > 2.5 * measured["weights"]
    assert measured["left"] < 1.6 * measured["weights"], "codes of one byte, and what the heap holds besides"
