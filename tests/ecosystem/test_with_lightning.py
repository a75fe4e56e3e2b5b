"""The module of `examples/lightning_module.py`, which converts itself, under Lightning's own Trainer."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed: `nox -s ecosystem` installs it")

from lightning.pytorch.callbacks import ModelCheckpoint

import fp8_torch_fsdp as f8
from examples.lightning_module import Model
from fp8_torch_fsdp.integrations.lightning import STATE_KEY, Float8Callback

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future


def module(recipe):
    torch.manual_seed(0)
    return Model(recipe, sharded=False)


def fit(model, *, checkpoint=None, epochs=5, **options):
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(32, 32)), batch_size=8)
    options |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **options)
    trainer.fit(model, data, ckpt_path=checkpoint)
    return trainer


def test_the_module_is_converted_before_the_optimizer_is_made_and_histories_grow_in_mixed_precision():
    model, dtypes = module("tensorwise_delayed"), set()
    model.layers.register_forward_hook(lambda layers, inputs, output: dtypes.add(output.dtype))
    (optimizer,) = fit(model, precision="bf16-mixed", enable_checkpointing=False).optimizers
    assert isinstance(model.layers[0], f8.Float8Linear)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert model.losses[-1] < model.losses[0]
    assert dtypes == {torch.bfloat16}
    f8.synchronize_scales(model)
    assert (model.layers[0].fp8_input.history > 0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, recipe):
    def run(epochs, checkpoint=None):
        model, saver = module(recipe), ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}-{{epoch}}")
        fit(model, epochs=epochs, checkpoint=checkpoint, callbacks=[saver, Float8Callback(tmp_path / "run")])
        return model, saver.best_model_path

    (whole, _), (_, path) = run(4), run(2)
    saved = torch.load(path, weights_only=False)
    assert (STATE_KEY in saved) == ("delayed" in recipe)
    assert set(saved["state_dict"]) == set(module(recipe).state_dict()), "keys of the module before conversion"
    resumed, _ = run(4, path)
    assert resumed.losses == whole.losses[-8:]
    one, other = ({**m.state_dict(), **f8.DelayedState(m).state_dict()} for m in (whole, resumed))
    assert len(one) == 4 + 2 * 3 * 5 * ("delayed" in recipe)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_callback_logs_optimizer_steps_of_accumulated_batches_and_goes_on_after_a_resume(tmp_path):
    """8 optimizer steps of 2 batches each, then 4 more from a checkpoint."""
    steps = []

    def run(epochs, checkpoint=None):
        saver = ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}-{{epoch}}")
        log = Float8Callback(tmp_path / "run", every=3, scalars=lambda values, step: steps.append(step))
        options = {"callbacks": [saver, log], "accumulate_grad_batches": 2}
        fit(module("tensorwise_delayed"), epochs=epochs, checkpoint=checkpoint, **options)
        return saver.best_model_path

    path = run(4)
    assert steps == [1, 3, 6]
    run(6, path)
    assert steps == [1, 3, 6, 9, 12]
    written = [json.loads(line) for line in (tmp_path / "run" / "fp8.jsonl").read_text().splitlines()]
    assert [record["step"] for record in written] == steps
    layers = [
        name for name, layer in module("tensorwise").layers.named_children() if isinstance(layer, torch.nn.Linear)
    ]
    for record in written:
        assert {name.rpartition("/")[0] for name in record["tensors"]} == {f"layers.{name}" for name in layers}
        assert len(record["tensors"]) == 3 * len(layers)
