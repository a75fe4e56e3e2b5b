"""The Llama-like benchmark: what it measures, that it saves while running, and the stack that it trains."""

import json

import pytest
import torch

import fp8_torch_fsdp as f8
from benchmarks import bench_llama


def test_every_linear_layer_of_a_block_is_converted():
    for name, convert in bench_llama.contestants().items():
        model = bench_llama.Stack(bench_llama.SIZES["tiny"], 1)
        convert(model)
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert len(layers) == 7
        assert {type(layer) is torch.nn.Linear for layer in layers} == {name == "bf16"}


def test_blocks_look_back_only_and_notice_positions():
    torch.manual_seed(0)
    model = bench_llama.Stack(bench_llama.SIZES["tiny"], 2)
    x = torch.randn(1, 6, 128)
    changed = x.clone()
    changed[0, 4] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 5], after[0, 5])
    swapped = model(x[:, [1, 0, 2, 3, 4, 5]])
    assert not torch.allclose(before[0, 5], swapped[0, 5]), "without rotation attention ignores the order"


def test_results_are_saved_with_ratios(tmp_path):
    output = tmp_path / "new" / "llama.json"
    options = ["--device=cpu", "--size=tiny", "--blocks=1", "--tokens=16", "--rounds=1", "--backend=eager"]
    options += ["--only", "ours, tensorwise"]
    result = bench_llama.run(bench_llama.parse([*options, f"--output={output}"]))
    assert json.loads(output.read_text()) == result
    assert [(step["implementation"], step["compiled"]) for step in result["steps"]] == [
        (name, compiled) for compiled in (False, True) for name in ("bf16", "ours, tensorwise")
    ]
    assert all(step["times_bf16"] > 0 for step in result["steps"])
    assert {"torch", "torchao"} <= result["versions"].keys()


def test_a_step_is_one_of_delayed_scaling_too():
    model = bench_llama.Stack(bench_llama.SIZES["tiny"], 1)
    bench_llama.contestants()["ours, tensorwise_delayed"](model)
    model(torch.randn(1, 4, 128)).sum().backward()
    f8.synchronize_scales(model)
    histories = [buffer for name, buffer in model.named_buffers() if name.endswith("fp8_input.history")]
    assert len(histories) == 7
    assert all(history[0] > 0 for history in histories)


def test_experts_are_timed_in_the_recipes_that_convert_them(tmp_path, full):
    if not full:
        pytest.skip("a benchmark on a CPU: with --full")
    options = ["--device=cpu", "--size=tiny", "--model=experts", "--blocks=1", "--tokens=16", "--rounds=1"]
    options += ["--modes", "eager", "--only", "ours, rowwise", "--output", str(tmp_path / "experts.json")]
    result = bench_llama.run(bench_llama.parse(options))
    assert [step["implementation"] for step in result["steps"]] == ["bf16", "ours, rowwise"]
    model = bench_llama.Stack(bench_llama.SIZES["tiny"], 1, "experts")
    bench_llama.contestants("experts")["ours, rowwise"](model)
    assert {type(module).__name__ for module in model.modules() if hasattr(module, "grouped_product")}
    assert type(model.blocks[0].mixture.router) is torch.nn.Linear
