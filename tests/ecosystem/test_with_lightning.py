"""The precision plugin for Lightning, under Lightning's own Trainer."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed: `nox -s ecosystem` installs it")

from lightning.pytorch.callbacks import ModelCheckpoint

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.integrations.lightning import Float8Precision

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dtypes, self.losses = set(), []

    def training_step(self, batch, index):
        y = self.head(torch.relu(self.body(batch[0])))
        self.dtypes.add(y.dtype)
        loss = (y.float() - batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return optimizer


def fit(plugin, *, checkpoint=None, epochs=5, **options):
    model = Regression()
    data = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model


def test_the_module_is_converted_before_the_optimizer_is_made():
    model = fit(Float8Precision("rowwise", module_filter_fn=lambda layer, name: "head" not in name))
    assert isinstance(model.body, f8.Float8Linear)
    assert type(model.head) is nn.Linear
    assert model.known == {id(p) for p in model.parameters()}
    assert model.losses[-1] < model.losses[0]


def test_delayed_histories_grow_and_autocast_reaches_the_layers():
    model = fit(Float8Precision("tensorwise_delayed", autocast_dtype=torch.bfloat16))
    f8.synchronize_scales(model)
    assert (model.body.fp8_input.history > 0).all()
    assert model.dtypes == {torch.bfloat16}


def test_a_converted_module_is_left_alone():
    plugin, model = Float8Precision("rowwise"), Regression()
    f8.convert_to_float8_training(model)
    assert plugin.convert_module(model) is model
    assert model.body.config.weight.granularity == "tensorwise"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, recipe):
    def run(epochs, checkpoint=None):
        saver = ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}-{{epoch}}")
        options = {"enable_checkpointing": True, "callbacks": [saver]}
        return fit(Float8Precision(recipe), epochs=epochs, checkpoint=checkpoint, **options), saver.best_model_path

    (whole, _), (_, path) = run(4), run(2)
    saved = torch.load(path, weights_only=False)
    assert set(saved["state_dict"]) == set(Regression().state_dict()), "checkpoints fit the module before conversion"
    resumed, _ = run(4, path)
    assert resumed.losses == whole.losses[-8:]
    for layer in ("body", "head"):
        one, other = whole.get_submodule(layer).state_dict(), resumed.get_submodule(layer).state_dict()
        assert len(one) == (17 if "delayed" in recipe else 2)
        assert all(torch.equal(one[name], other[name]) for name in one)
