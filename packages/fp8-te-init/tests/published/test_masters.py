"""Full fine-tuning from published codes: masters, and scales by the file's own rule in each step."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fp8_common import Fp8Error
from fp8_te_init.published import PublishedOptimizer, convert_published, load_published, save_published
from published_files import LAYOUTS, MOE, ODD, quantize, tensors_of, values_of, write
from published_models import Llama, batch, fill_twin, loss_of
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


def places_in(name, parameter):
    """Yield the tensors of the file that a parameter is made of, and the part of it that each is."""
    above, _, last = name.rpartition(".")
    if parameter.ndim < 3:
        yield name, slice(None)
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
    rows = parameter.shape[1] // len(parts)
    for expert in range(len(parameter)):
        for place, part in enumerate(parts):
            yield f"{above}.{expert}.{part}.weight", (expert, slice(place * rows, (place + 1) * rows))


class Twin:
    """The same by plain means: bfloat16 weights that are dequantized again after each step of float32 masters."""

    def __init__(self, folder, layout, lr, config=ODD):
        self.model = fill_twin(Llama(config).to_empty(device="cpu"), folder)
        _, self.scale_name, self.dtype, self.how, _ = LAYOUTS[layout]
        self.tensors, plain, self.places = tensors_of(folder), [], {}
        for name, parameter in self.model.named_parameters():
            places = dict(places_in(name, parameter))
            coded = [key for key in places if self.tensors[key].dtype == torch.float8_e4m3fn]
            plain += [] if coded else [parameter]
            self.places |= {key: (parameter, places[key]) for key in coded}
        self.masters = {name: values_of(self.tensors, name, torch.float32).requires_grad_() for name in self.places}
        self.inner = torch.optim.AdamW([*plain, *self.masters.values()], lr=lr)

    @torch.no_grad()
    def step(self):
        for name, (parameter, place) in self.places.items():
            self.masters[name].grad = parameter.grad[place].float()
        self.inner.step()
        for name, (parameter, place) in self.places.items():
            scale = f"{name.removesuffix('.weight')}.{self.scale_name}"
            self.tensors[name], self.tensors[scale] = quantize(self.masters[name], self.how, self.dtype)
            parameter[place] = values_of(self.tensors, name)

    def zero_grad(self):
        self.inner.zero_grad()
        self.model.zero_grad()


@pytest.mark.parametrize("config", [ODD, MOE], ids=["odd", "moe"])
@pytest.mark.parametrize("layout", ["deepseek", "qwen", "deepseek-v4", "compressed-channel", "modelopt"])
def test_codes_and_scales_after_each_step_are_those_of_the_files_rule(tmp_path, layout, config):
    folder = write(tmp_path / "in", config, layout)
    model, twin = loaded(folder, config), Twin(folder, layout, 1e-2, config)
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
    again = loaded(tmp_path / "out", config)
    assert same(again(batch(0)).detach(), model(batch(0)).detach())


@pytest.mark.distributed
@pytest.mark.parametrize(("config", "layout"), [(ODD, "deepseek"), (MOE, "deepseek"), (MOE, "modelopt")])
def test_two_ranks_write_the_codes_and_scales_of_one(run_ranks, tmp_path, config, layout):
    """Rows that two ranks hold of one block share its scale; experts are held whole, and each rank has all scales."""
    folder = write(tmp_path / "in", config, layout)
    model = loaded(folder, config)
    losses = train(model, PublishedOptimizer(torch.optim.AdamW, model, lr=1e-2))
    save_published(model, tmp_path / "one", folder)
    assert run_ranks(2, train_on_rank, str(folder), str(tmp_path / "two"), config) == [losses] * 2
    for file in folder.iterdir():
        assert (tmp_path / "one" / file.name).read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def train_on_rank(rank, world, folder, out, config):
    model = Llama(config)
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


@pytest.mark.parametrize("config", [ODD, MOE], ids=["odd", "moe"])
@pytest.mark.parametrize("layout", ["deepseek", "compressed-channel", "modelopt"])
def test_training_multiplies_in_fp8_too(tmp_path, layout, config):
    """Gradients of weights differ from those of decoded values by what FP8 activations and gradients round away."""
    folder = write(tmp_path, config, layout)
    grads = {}
    for multiply in ("decoded", "fp8"):
        model = loaded(folder, config, multiply=multiply)
        optimizer = PublishedOptimizer(torch.optim.AdamW, model, lr=3e-3)
        loss_of(model, batch(0)).backward()
        named = model.named_parameters()
        grads[multiply] = {name: one.grad.float() for name, one in named if one.grad is not None}
        optimizer.zero_grad()
    assert grads["fp8"].keys() == grads["decoded"].keys()
    for name, wide in grads["decoded"].items():
        if name.endswith(("proj.weight", "_proj")):  # a router that flips is not what is compared here
            assert 1e-3 < float((grads["fp8"][name] - wide).norm() / wide.norm()) < 0.35, name
    losses = train(model, optimizer, 8)
    assert losses[-1] < losses[0] - 0.2


def test_what_cannot_be_trained_is_an_error(tmp_path):
    folder = write(tmp_path / "odd")
    with pytest.raises(Fp8Error, match="has no published weights: call load_published first"):
        PublishedOptimizer(torch.optim.AdamW, Llama(ODD), lr=1e-3)
    optimizer = PublishedOptimizer(torch.optim.AdamW, loaded(folder), lr=1e-3)
    with pytest.raises(Fp8Error, match="No published weight has a gradient"):
        optimizer.step()
