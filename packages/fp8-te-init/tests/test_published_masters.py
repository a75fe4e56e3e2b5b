"""Full fine-tuning from published codes: masters, and scales by the file's own rule in each step."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_te_init.published import PublishedOptimizer, convert_published, load_published, save_published
from tests.helpers.published_files import LAYOUTS, MOE, ODD, quantize, tensors_of, values_of, write
from tests.helpers.published_models import Llama, batch, fill_twin, loss_of
from tests.helpers.tensors import reloaded, same


def loaded(folder, config=ODD, **options):
    model = Llama(config)
    load_published(model, folder, **options)
    return model


def train(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Twin:
    """The same by plain means: bfloat16 weights that are dequantized again after each step of float32 masters."""

    def __init__(self, folder, layout, lr):
        self.model = fill_twin(Llama(ODD).to_empty(device="cpu"), folder)
        _, self.scale_name, self.dtype, self.how, _ = LAYOUTS[layout]
        self.tensors, self.masters = tensors_of(folder), {}
        named = dict(self.model.named_parameters())
        coded = [name for name in named if self.tensors[name].dtype == torch.float8_e4m3fn]
        self.masters = {name: values_of(self.tensors, name, torch.float32).requires_grad_() for name in coded}
        plain = [parameter for name, parameter in named.items() if name not in coded]
        self.inner = torch.optim.AdamW([*plain, *self.masters.values()], lr=lr)

    @torch.no_grad()
    def step(self):
        for name, master in self.masters.items():
            master.grad = self.model.get_parameter(name).grad.float()
        self.inner.step()
        for name, master in self.masters.items():
            scale = f"{name.removesuffix('.weight')}.{self.scale_name}"
            self.tensors[name], self.tensors[scale] = quantize(master, self.how, self.dtype)
            self.model.get_parameter(name).copy_(values_of(self.tensors, name))

    def zero_grad(self):
        self.inner.zero_grad()
        self.model.zero_grad()


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "deepseek-v4", "compressed-channel", "modelopt"])
def test_codes_and_scales_after_each_step_are_those_of_the_files_rule(tmp_path, layout):
    folder = write(tmp_path / "in", ODD, layout)
    model, twin = loaded(folder), Twin(folder, layout, 1e-2)
    losses = train(model, PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2), 6)
    assert losses == train(twin.model, twin, 6)
    assert losses[-1] < losses[0]
    save_published(model, tmp_path / "out", folder)
    saved, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    for name in twin.masters:
        scale = f"{name.removesuffix('.weight')}.{LAYOUTS[layout][1]}"
        assert same(saved[name], twin.tensors[name]), name
        assert same(saved[scale], twin.tensors[scale]), scale
        assert not same(saved[name], before[name])
    again = loaded(tmp_path / "out")
    assert same(again(batch(0)).detach(), model(batch(0)).detach())


@pytest.mark.distributed
def test_two_ranks_write_the_codes_and_scales_of_one(run_ranks, tmp_path):
    """Rows that two ranks hold of one block share its scale."""
    folder = write(tmp_path / "in")
    model = loaded(folder)
    losses = train(model, PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2))
    save_published(model, tmp_path / "one", folder)
    assert run_ranks(2, train_on_rank, str(folder), str(tmp_path / "two")) == [losses] * 2
    for file in folder.iterdir():
        assert (tmp_path / "one" / file.name).read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def train_on_rank(rank, world, folder, out):
    model = Llama(ODD)
    convert_published(model, folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_published(model, folder)
    losses = train(model, PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2))
    save_published(model, out, folder)
    return losses


def test_a_run_goes_on_from_its_state(tmp_path):
    folder = write(tmp_path)
    model = loaded(folder)
    optimizer = PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2)
    train(model, optimizer)
    states = reloaded((model.state_dict(), optimizer.state_dict()))
    wanted = train(model, optimizer)
    again = loaded(folder)
    again.load_state_dict(states[0])
    resumed = PublishedOptimizer(torch.optim.AdamW, again, lr=1e-2)
    resumed.load_state_dict(states[1])
    assert train(again, resumed) == wanted


def test_what_cannot_be_trained_is_an_error(tmp_path):
    folder = write(tmp_path / "odd")
    with pytest.raises(Fp8Error, match="has no published weights: call load_published first"):
        PublishedOptimizer(torch.optim.AdamW, Llama(ODD), lr=1e-3)
    with pytest.raises(Fp8UnsupportedError, match=r"q_proj.weight cannot be trained"):
        PublishedOptimizer(torch.optim.AdamW, loaded(folder, multiply="fp8"), lr=1e-3)
    moe = loaded(write(tmp_path / "moe", MOE), MOE)
    with pytest.raises(Fp8UnsupportedError, match=r"experts.gate_up_proj cannot be trained"):
        PublishedOptimizer(torch.optim.AdamW, moe, lr=1e-3)
    optimizer = PublishedOptimizer(torch.optim.AdamW, loaded(folder), lr=1e-3)
    with pytest.raises(Fp8Error, match="No published weight has a gradient"):
        optimizer.step()
