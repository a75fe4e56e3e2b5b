"""The torch operators: they equal NumPy, pass opcheck, and behave under torch.compile, autograd and fake tensors."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch.library import opcheck

import fp8_common as f8
import fp8_common.torch.foreach
import fp8_common.torch_layers.linear.gated
import fp8_common.torch_layers.linear.grouped
from fp8_common import torch as f8t
from fp8_common.presets import te_delayed
from fp8_common.testing import assert_same_bits
from fp8_common.torch import casts, decoding, delayed
from fp8_common.torch._operators import NAMESPACE, policy_key, policy_of_key
from fp8_common.torch_layers.linear.group_offsets import GroupOffsets


def parts_of(made):
    return made.codes, made.scale, made.scale_inv


POLICY = policy_key(f8.CANONICAL)
X = torch.linspace(-3, 3, 4 * 40).reshape(4, 40)
ONE = torch.tensor(2.0)
CODES = f8t.quantize(X, ONE, "e4m3").view(torch.uint8)
BITS = torch.arange(160, dtype=torch.int32).reshape(4, 40)
# two groups of two rows, each with a weight of its own
GROUPS = torch.tensor([2, 4], dtype=torch.int32)
WEIGHTS = f8t.quantize(torch.linspace(-2, 2, 2 * 8 * 40).reshape(2, 8, 40), ONE, "e4m3").view(torch.uint8)
H, OF_GROUPS = X.bfloat16(), GroupOffsets(GROUPS, 4)
PADDED = torch.tensor([16, 32], dtype=torch.int32)
PLACES = OF_GROUPS.of_row, OF_GROUPS.source, OF_GROUPS.of_place, OF_GROUPS.padded[1]
EMULATED = [True, False, False, False]

OPERATORS = {
    "amax": (X,),
    "scales": (X.abs(), None, "e4m3", POLICY),
    "scales_with_prev": (X.abs(), ONE, "e4m3", POLICY),
    "reciprocal": (ONE,),
    "quantize": (X, ONE, "e4m3"),
    "quantize_with_amax": (X, ONE, "e4m3"),
    "dynamic": (X, None, None, "e4m3", POLICY, None),
    "dynamic_of_rows": (X, None, None, "e4m3", POLICY, [1, 0]),
    "dynamic_of_columns": (X, None, None, "e4m3", POLICY, [0, 1]),
    "dynamic_of_blocks": (X, None, None, "e4m3", POLICY, [1, 128]),
    "dynamic_of_folded_rows": (X, torch.linspace(0.5, 2, 40), None, "e4m3", POLICY, [1, 0]),
    "dynamic_of_groups": (X, X.abs() + 1, BITS[0, :4], "e4m3", POLICY, [1, 0]),
    "quantize_transposed": (X, X.abs().max(), "e4m3", POLICY),
    "rows_and_columns": (X, None, "e4m3", POLICY),
    "rows_and_columns_of_folded_rows": (X, torch.linspace(0.5, 2, 40), "e4m3", POLICY),
    "rows_with_transpose": (X, "e4m3", POLICY),
    "rows_with_transpose_of_stacks": (X.reshape(2, 4, 20), "e4m3", POLICY),
    "blocks_both": (X, "e4m3", POLICY, False),
    "blocks_both_of_squares": (X, "e4m3", POLICY, True),
    "quantize_mx": (X, "e4m3", "rceil"),
    "values": (CODES, "e4m3", torch.bfloat16),
    "dequantize": (CODES, ONE, "e4m3", torch.bfloat16, None),
    "dequantize_of_blocks": (CODES, torch.ones(4, 1), "e4m3", torch.float32, [1, 128]),
    "dequantize_mx": (CODES, torch.full((4, 2), 127, dtype=torch.uint8), "e4m3", torch.float32),
    "foreach_amax": ([X, X[:1, :3], X[:0]],),
    "foreach_quantize": ([X, X[:1, :3], X[:0]], torch.tensor([1.0, 2.0, 3.0]), "e4m3"),
    "segment_amax": (X, torch.tensor([0, 0, 1, 2], dtype=torch.int32), 2, True),
    "group_columns": (X, GROUPS, torch.tensor([16, 32], dtype=torch.int32), 48, "e4m3", POLICY),
    "group_rows_and_columns": (X, None, GROUPS, torch.tensor([16, 32], dtype=torch.int32), 48, "e4m3", POLICY),
    "group_rows_and_columns_of_folded": (
        *(X, torch.ones(2, 40), GROUPS),
        *(torch.tensor([16, 32], dtype=torch.int32), 48, "e4m3", POLICY),
    ),
    "gated_rows": (H, H, "e4m3", POLICY),
    "gated_rows_over_both": (H, None, "e4m3", POLICY),
    "gated_back": (H, H, H, torch.ones(2, 40), torch.ones(2, 40), *PLACES, "e4m3", POLICY),
    "gated_back_over_both": (H, None, H[:, :20], torch.ones(2, 40), None, *PLACES, "e4m3", POLICY),
    "multiply_rows": (CODES, WEIGHTS, torch.ones(4, 1), torch.ones(2, 8), GROUPS, "e4m3", "e4m3", True),
    "multiply_over_rows": (CODES, CODES[:2], torch.ones(2, 4), torch.ones(2, 2), PADDED, "e4m3", "e4m3", True),
    "fill_rows_with_zeros": (torch.ones(4, 3, 2), torch.tensor([True, False, True, False])),
    "cast_transposed": (X, ONE, "e4m3"),
    "copied_by_rows": (CODES.t(),),
    "transposed_rows": (CODES, torch.tensor([2, -1, 0], dtype=torch.int32)),
    "transposed_rows_of_all": (CODES, None),
    "grouped_matmul": (
        *(CODES, torch.ones(2), "e4m3", None),
        *(WEIGHTS, torch.ones(2), "e4m3", None),
        *(GROUPS, False, torch.bfloat16, EMULATED),
    ),
    "grouped_matmul_between_rows": (
        *(CODES, torch.ones(2), "e4m3", None),
        *(f8t.quantize(X[:, :16], ONE, "e5m2").view(torch.uint8), torch.ones(2), "e5m2", None),
        *(GROUPS, True, torch.float32, EMULATED),
    ),
    "grouped_matmul_wide": (X, X[:, :16], GROUPS),
    "grouped_rows_wide": (X, X.new_ones(len(GROUPS), X.shape[1], 16), GROUPS),
    "cast_delayed": (X, X.abs().max(), ONE, torch.tensor(True), None, "e4m3", POLICY, True),
    "cast_delayed_of_late": (X, X.abs().max(), ONE, torch.tensor(True), torch.tensor(False), "e4m3", POLICY, False),
    "delayed_update": (torch.ones(3, 2), torch.ones(2), torch.ones(2), "e4m3,e5m2", policy_key(te_delayed())),
}


def operator_of(case):
    """Return the operator's name: variants carry a suffix."""
    return re.sub("_(over_both|of|with_a|with_prev|between)(_.*)?$", "", case) if case != "quantize_with_amax" else case


@pytest.mark.parametrize("case", OPERATORS)
def test_opcheck(case):
    name = operator_of(case)
    opcheck(getattr(torch.ops.fp8_common, name).default, OPERATORS[case])


def test_every_operator_is_checked():
    assert NAMESPACE == "fp8_common"
    defined = {
        name.removeprefix("fp8_common::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp8_common::")
    }
    assert defined == {operator_of(case) for case in OPERATORS}


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_update_equals_numpy_tensor_by_tensor(algo):
    rng, policy, names = np.random.default_rng(0), te_delayed(algo=algo, margin=1), ["e4m3", "e5m2", "e5m2", "e4m3"]
    history, scale = rng.random((3, 4), np.float32), rng.random(4, np.float32)
    observed = np.array([5.0, np.inf, np.nan, 0.0], np.float32)
    got = delayed.delayed_update(*map(torch.from_numpy, (history, observed, scale)), ",".join(names), policy)
    window, amax = f8.numerics.update_history(history, observed, algo)
    want = np.array([f8.amax_to_scale(a, n, policy, s) for a, n, s in zip(amax, names, scale, strict=True)])
    for result, definition in zip(got, (window, want), strict=True):
        assert_same_bits(result, definition)


@pytest.mark.parametrize("name", ["a|b", "|", "", "1|2|3|4|5|6|7|8|9|10|11|12"])
def test_a_policy_may_have_any_name(name):
    policy = dataclasses.replace(f8.POWER_OF_2, name=name, margin=2)
    assert policy_of_key(policy_key(policy)) == policy
    data, scale = f8t.quantize_rowwise(X, "e4m3", -1, policy)
    want = f8.quantize_rowwise(X.numpy(), "e4m3", -1, policy)
    assert_same_bits(data.view(torch.uint8).numpy(), want[0])
    assert_same_bits(scale.numpy(), want[1])


def test_a_compiled_function_tells_a_policy_from_one_that_was_freed_at_its_address():
    compiled = torch.compile(lambda policy: f8t.quantize_rowwise(X, "e4m3", -1, policy)[1], backend="eager")
    policy = f8.ScalePolicy(eps=1e-6)
    compiled(policy)
    address = id(policy)
    del policy
    others = []
    for _ in range(10_000):
        others.append(f8.ScalePolicy(eps=10.0))
        if id(others[-1]) == address:
            break
    want = f8.quantize_rowwise(X.numpy(), "e4m3", -1, others[-1])[1]
    assert_same_bits(compiled(others[-1]).numpy(), want)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_function_follows_the_policies_it_is_given(dynamic):
    """No policy is taken for an earlier one, and its numbers do not become symbols."""
    compiled = torch.compile(
        lambda policy: f8t.quantize_rowwise(X, "e4m3", -1, policy)[1], fullgraph=True, backend="eager", dynamic=dynamic
    )
    numbers = [(0, 0.0, 2.0**100, 0), (3, 1e-6, 2.0**99, 16), (-2, 1e-3, 2.0, 4), (3, 10.0, 2.0**99, 16)]
    for margin, eps, upper, history in numbers:
        policy = f8.ScalePolicy(margin=margin, eps=eps, upper=upper, history=history)
        assert_same_bits(compiled(policy).numpy(), f8.quantize_rowwise(X.numpy(), "e4m3", -1, policy)[1])


def decided(x):
    """Everything that chooses between a function and its operator."""
    scale = casts.scale_from_amax(casts.amax(x), f8.E4M3, f8.CANONICAL)
    codes, blocks = casts.quantize(x, scale, f8.E4M3), casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (1, 128))
    turned = casts.quantize_dynamic(x.t(), f8.E5M2, f8.CANONICAL, (1, 0))
    return (
        *(scale, casts.reciprocal(scale), codes),
        *(decoding.values(codes, f8.E4M3), decoding.values(turned.codes.t(), f8.E5M2, torch.bfloat16)),
        decoding.dequantize(codes, casts.reciprocal(scale), f8.E4M3, torch.bfloat16),
        decoding.dequantize(blocks.codes, blocks.scale_inv, f8.E4M3, torch.float32, (1, 128)),
        *(*parts_of(turned), *parts_of(blocks)),
        *parts_of(casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL)),
        *parts_of(casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (0, 1))),
        *parts_of(casts.quantize_dynamic(x.view(2, 2, 40), f8.E4M3, f8.CANONICAL, (0, 0))),
        *casts.quantize_with_amax(x, scale, f8.E5M2)[:2],
        *parts_of(casts.quantize_dynamic(x, f8.E4M3, f8.CANONICAL, (1, 0), fold=x[0])),
        *casts.quantize_mx(x, f8.E4M3, "rceil"),
    )


def test_a_compiler_sees_operators_and_gets_the_same_bits():
    captured = set()

    def backend(graph, inputs):
        captured.update(str(node.target).removeprefix("fp8_common.") for node in graph.graph.nodes)
        return graph.forward

    got, want = torch.compile(decided, fullgraph=True, backend=backend)(X * 7), decided(X * 7)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
        assert a.stride() == b.stride()
    names = {"amax", "scales", "reciprocal", "quantize", "quantize_with_amax", "dynamic"}
    assert {f"{name}.default" for name in (*names, "quantize_mx", "values", "dequantize")} <= captured


def test_gradients():
    x = X.clone().requires_grad_()
    assert not f8t.quantize(x, ONE, "e4m3").requires_grad
    assert not f8t.amax(x).requires_grad
    weight = torch.randn_like(x)
    (f8t.fake_quantize(x, ONE, "e4m3") * weight).sum().backward()
    assert torch.equal(x.grad, weight)
