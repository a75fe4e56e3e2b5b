"""A module that converts itself in `configure_model`, under Lightning's own Trainer."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed: `nox -s ecosystem` installs it")

from lightning.pytorch.callbacks import ModelCheckpoint

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future


QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Regression(lightning.LightningModule):
    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.recipe, self.layers = recipe, nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.dtypes, self.losses = set(), []

    def configure_model(self):
        if type(self.layers[0]) is nn.Linear:
            f8.convert_to_float8_training(self.layers, recipe=self.recipe, module_filter_fn=lambda _, name: name != "2")

    def on_save_checkpoint(self, checkpoint):
        checkpoint["fp8"] = f8.DelayedState(self).state_dict()

    def on_load_checkpoint(self, checkpoint):
        f8.DelayedState(self).load_state_dict(checkpoint["fp8"])

    def training_step(self, batch, index):
        y = self.layers(batch[0])
        self.dtypes.add(y.dtype)
        loss = (y.float() - batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return optimizer


def fit(recipe, *, checkpoint=None, epochs=5, **options):
    model = Regression(recipe)
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, **QUIET | options)
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model


def test_the_module_is_converted_before_the_optimizer_is_made_and_histories_grow_in_mixed_precision():
    model = fit("tensorwise_delayed", precision="bf16-mixed")
    assert isinstance(model.layers[0], f8.Float8Linear)
    assert type(model.layers[2]) is nn.Linear
    assert model.known == {id(p) for p in model.parameters()}
    assert model.losses[-1] < model.losses[0]
    assert model.dtypes == {torch.bfloat16}
    f8.synchronize_scales(model)
    assert (model.layers[0].fp8_input.history > 0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "tensorwise_delayed"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, recipe):
    def run(epochs, checkpoint=None):
        saver = ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}-{{epoch}}")
        options = {"enable_checkpointing": True, "callbacks": [saver]}
        return fit(recipe, epochs=epochs, checkpoint=checkpoint, **options), saver.best_model_path

    (whole, _), (_, path) = run(4), run(2)
    saved = torch.load(path, weights_only=False)
    assert set(saved["state_dict"]) == set(Regression(recipe).state_dict()), "keys of the module before conversion"
    resumed, _ = run(4, path)
    assert resumed.losses == whole.losses[-8:]
    one, other = ({**m.state_dict(), **f8.DelayedState(m).state_dict()} for m in (whole, resumed))
    assert len(one) == (4 + 3 * 5 if "delayed" in recipe else 4)
    assert all(torch.equal(one[name], other[name]) for name in one)
