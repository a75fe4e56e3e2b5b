"""The real TransformerEngine, where it can be imported: on a CPU its tensors, on a GPU its layers and its optimizer."""

import importlib

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_te_init.transformer_engine import NEEDED, PER_TENSOR, RECIPES, fp8_of

te = pytest.importorskip(
    "transformer_engine.pytorch",
    reason="TransformerEngine cannot be imported: it needs its CUDA libraries and a torch extension",
    exc_type=(ImportError, OSError, AssertionError),
)


def real_tensor(values: torch.Tensor, scale: float, monkeypatch):
    """Build a Float8Tensor on the device of `values` from data, as its own constructor takes it."""
    import transformer_engine.pytorch.tensor.float8_tensor as module
    import transformer_engine.pytorch.tensor.storage.float8_tensor_storage as storage
    from transformer_engine.pytorch import DType

    for place in (module, storage):
        # what asks for the GPU's capability, which a CPU does not have
        if hasattr(place, "is_non_tn_fp8_gemm_supported"):
            monkeypatch.setattr(place, "is_non_tn_fp8_gemm_supported", lambda *args, **kwargs: True)
    device = values.device
    quantizer = module.Float8Quantizer(
        scale=torch.full((1,), scale, device=device), amax=torch.zeros(1, device=device), fp8_dtype=DType.kFloat8E4M3
    )
    codes = (values * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return module.Float8Tensor(
        shape=values.shape,
        dtype=values.dtype,
        data=codes,
        fp8_scale_inv=torch.full((1,), scale, device=device).reciprocal(),
        fp8_dtype=DType.kFloat8E4M3,
        quantizer=quantizer,
        device=device,
    )


def test_the_real_tensor_offers_what_the_adapter_uses(monkeypatch):
    tensor = real_tensor(torch.randn(32, 64) * 0.02, 1000.0, monkeypatch)
    assert type(tensor).__name__ == PER_TENSOR
    assert [name for name in NEEDED[PER_TENSOR] if not hasattr(tensor, name)] == []


def test_the_adapter_reads_and_writes_the_real_tensor(monkeypatch):
    values = torch.randn(32, 64) * 0.02
    rows = fp8_of(nn.Parameter(real_tensor(values, 1000.0, monkeypatch)))
    assert torch.equal(rows.quantized(values), rows.local_codes)
    rows.quantize_(values, rows.amax_bits(values))
    assert ((rows.values() - values).norm() / values.norm()) < 0.04
    assert torch.equal(rows.quantized(values), rows.local_codes)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "blockwise"])
def test_real_layers_and_their_optimizer_start_from_the_values_before_rounding(recipe):
    if recipe == "blockwise" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("block-wise products of TransformerEngine need sm_90")
    torch.manual_seed(0)
    reference = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True, backend="te"):
        layer = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16)
    start = layer.weight.get_high_precision_init_val()
    assert torch.equal(start, reference.weight.cpu())
    optimizer = te.optimizers.FusedAdam(layer.parameters(), master_weights=True)
    assert set(fti.seed_masters(optimizer, layer).sources.values()) == {"init"}
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param").cpu(), start.float())
    assert fp8_of(layer.weight).init_values() is None
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    # its weights can be multiplied under the recipe that made them alone
    made = getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[recipe])()
    with te.autocast(enabled=True, recipe=made):
        y = layer(x)
    y.float().square().mean().backward()
    optimizer.step()
    exact = reference(x)
    assert (y - exact).norm() / exact.norm() < 0.1
