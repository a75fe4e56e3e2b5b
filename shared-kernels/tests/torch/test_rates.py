"""The rates that `fp8-bench --rates` measures are those that `fp8 advise --rates` takes; no clock, and no GPU."""

import json

import pytest
import torch

from fp8_common import _cli
from fp8_common._errors import Fp8UnsupportedError
from fp8_common.bench import command
from fp8_common.torch import _rates as rates


def test_rates_are_operations_by_seconds():
    ran = []

    def timer(run):
        ran.append(run())
        return 0.5

    found = rates.product_rates(torch.device("cpu"), timer, size=64, heads=2, rounds=3)
    assert found == {"bf16": 4 * 64**3, "fp8": 4 * 64**3, "attention": 3.5 * 4 * 64 * 64 * 256}
    wide, coded = ran[0].float(), ran[3].float()
    assert 0.001 < ((wide - coded).norm() / wide.norm()).item() < 0.1, "the same product, in FP8"
    assert [grad.shape for grad in ran[6]] == [(1, 2, 64, 128)] * 3, "attention with its backward"


def test_what_is_printed_can_be_handed_to_advise(monkeypatch, capsys):
    measured = {"bf16": 6.123e14, "fp8": 1.2e15, "attention": 4e14}
    monkeypatch.setattr(rates, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(rates, "cuda_timer", lambda: lambda run: 1.0)
    monkeypatch.setattr(rates, "copy_ceiling", lambda timer: 2900.0)
    monkeypatch.setattr(rates, "product_rates", lambda device, timer: measured)
    assert command.main(["--rates"]) == 0
    text = capsys.readouterr().out.strip()
    assert _cli.main(["advise", "--rates", text, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    machine = facts["job"]["accelerator"]
    assert {name: machine[name] for name in (*measured, "bandwidth")} == {**measured, "bandwidth": 2.9e12}


def test_without_a_gpu_it_is_one_sentence(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(Fp8UnsupportedError, match="Timing needs an NVIDIA GPU"):
        rates.run()
    assert command.main(["--rates"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
