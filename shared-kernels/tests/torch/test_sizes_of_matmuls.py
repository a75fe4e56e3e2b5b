"""Which sizes FP8 tensor cores are given: matmuls on fake CUDA tensors, whose sizes torch checks as on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_common import Fp8Error
from fp8_common.formats import get_format
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.matmul import MatmulOptions, matmul


def operand(rows, inner, by_rows):
    codes = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device="cuda")
    return Quantized(codes, torch.ones((rows, 1) if by_rows else (), device="cuda"), get_format("e4m3"))


def product(rows, inner, columns, *, by_rows=(False, False), **pad):
    with FakeTensorMode(), torch.no_grad():
        a, b = operand(rows, inner, by_rows[0]), operand(columns, inner, by_rows[1])
        return matmul(a, b, MatmulOptions(torch.bfloat16, emulate=False, **pad))


# a torch without CUDA cannot copy a fake tensor that is not contiguous
needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
MIXED = [pytest.param((True, False), marks=needs_cuda_build), pytest.param((False, True), marks=needs_cuda_build)]


@pytest.mark.parametrize("by_rows", [(False, False), (True, True), *MIXED])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_tokens_need_no_multiple_of_16(tokens, by_rows):
    assert product(tokens, 64, 32, by_rows=by_rows).shape == (tokens, 32), "output"
    assert product(tokens, 32, 64, by_rows=by_rows).shape == (tokens, 64), "gradient of the input"
    grad_weight = product(32, tokens, 64, by_rows=by_rows, pad_inner=True)
    assert grad_weight.shape == (32, 64)
    assert grad_weight.is_contiguous()


@pytest.mark.parametrize(("inner", "columns"), [(72, 32), pytest.param(64, 40, marks=needs_cuda_build)])
def test_features_are_padded_on_request_only(inner, columns):
    assert product(8, inner, columns, pad_inner=True, pad_outer=True).shape == (8, columns)
    with pytest.raises(Fp8Error, match=rf"multiples of 16, got K={inner} and N={columns}.*pad_inner_dim=True"):
        product(8, inner, columns)
    with pytest.raises(Fp8Error, match="N=40"):
        product(32, 7, 40, pad_inner=True)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_compiler_sees_one_graph(by_rows):
    def computed(codes, scale_inv):
        one = Quantized(codes, scale_inv, get_format("e4m3"))
        return matmul(one, one, MatmulOptions(torch.bfloat16, emulate=False))

    with FakeTensorMode(), torch.no_grad():
        one = operand(32, 64, by_rows)
        y = torch.compile(computed, fullgraph=True, backend="eager")(one.codes, one.scale_inv)
    assert y.shape == (32, 32)
    assert y.device.type == "cuda"
