"""What vLLM's own function makes of block scales after it has loaded them: the rule of `power_of_2_scales`.

A wheel of vLLM wants CUDA. For this function its Python files are enough, on PYTHONPATH beside pyzmq, msgspec,
cloudpickle, cbor2, orjson, urllib3, requests and regex.
"""

import pytest
import torch

from fp8_te_init.published.digests import digest
from published_files import VLLM_CODES, VLLM_SCALES, drawn_blocks, engine_requantizes
from tests.helpers.tensors import same

utils = pytest.importorskip(
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    reason="the Python files of vLLM are not on PYTHONPATH",
    exc_type=ImportError,
)


def test_the_engine_of_our_tests_does_what_vllm_does():
    codes, scale = drawn_blocks()
    expected = engine_requantizes(codes, scale)
    utils.requant_weight_ue8m0_inplace(codes, scale)
    assert same(codes, expected[0])
    assert same(scale, expected[1])
    assert digest("codes", 0, codes.view(torch.uint8).numpy()) == VLLM_CODES
    assert digest("scale", 0, scale.view(torch.uint8).numpy()) == VLLM_SCALES
