"""What runs where no kernel does, torch's own operations: the tests of the kernels of gradients, lists and groups."""

import pytest
import torch

import fp8_common as f8
from fp8_common._reference.gradient_messages import MessageRows
from fp8_common.torch_layers.sharding import gradient_messages
from fp8_common.torch_layers.sharding.gradient_messages import pack_gradients, sum_gradients
from kernel_inputs import kernel_tests

globals().update(kernel_tests("test_gradient_kernels.py"))
globals().update(kernel_tests("test_foreach_kernels.py", "test_a_new_output_needs_no_new_table"))
ONE_LAUNCH = (
    "test_columns_of_groups_are_cast_and_turned_in_one_launch",
    "test_rows_and_columns_of_groups_are_cast_in_one_launch",
)
globals().update(kernel_tests("test_group_kernels.py", *ONE_LAUNCH))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(gradient_messages, "PIECE", 256)


@pytest.mark.parametrize(("length", "wide"), [(300, 0), (0, 300)])
def test_a_message_may_be_all_codes_or_all_wide(length, wide):
    rows = torch.randn(3, 300)
    message = pack_gradients(rows[:, :length], rows[:, :wide], f8.E4M3, None)
    total, rest = sum_gradients(message, (length, wide), torch.float32, f8.E4M3, 3)
    assert message.shape == (3, MessageRows(compressed=length, wide_bytes=4 * wide).nbytes)
    assert (total.shape, rest.shape) == ((length,), (wide,))
    torch.testing.assert_close(total if length else rest, rows.mean(0), rtol=0.1, atol=0.1)


def test_the_sections_of_a_message_begin_at_multiples_of_their_elements():
    assert MessageRows(compressed=300, wide_bytes=20).gaps == ((300, 304), (316, 320), (340, 352))
