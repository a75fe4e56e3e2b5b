"""Transformers' Trainer, alone and under Accelerate's FSDP2: runs that were resumed equal those that never stopped."""

import itertools
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

REASON = "Transformers and Accelerate are not installed: `nox -s ecosystem` installs them"
transformers = pytest.importorskip("transformers", reason=REASON)
accelerate = pytest.importorskip("accelerate", reason=REASON)

from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer, TrainerCallback, TrainingArguments

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common import _command as command
from fp8_torch_fsdp.integrations.transformers import STATE_FILE, Float8Callback
from tests.ecosystem.small import llama, loaded, local
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future

RECIPES = ["tensorwise", "rowwise", "tensorwise_delayed"]
PAGE = ROOT / "docs/jobs/transformers.md"


STEPS = {"max_steps": 6, "save_steps": 3, "logging_steps": 1}
STEPS |= {"use_cpu": True, "report_to": [], "disable_tqdm": True}


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (torch.arange(16) * (index % 5 + 1) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class StopAfterThree(TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        control.should_training_stop = state.global_step == 3


class Sharding(Trainer):
    """Accelerate chooses FSDP on accelerators only; from here on everything is its own FSDP2 path."""

    ram_efficient = False

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=self.ram_efficient,
            state_dict_type="SHARDED_STATE_DICT",
        )
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        self.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True


def trained(recipe, folder, *, trainer=Trainer, dtype=torch.float32, stops=False, checkpoint=None):
    model = llama(num_hidden_layers=2).to(dtype)
    f8.convert_to_float8_training(model, recipe=recipe, module_filter_fn=lambda layer, name: "lm_head" not in name)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        bf16=dtype == torch.bfloat16,
        learning_rate=1e-2,
        **STEPS,
    )
    callbacks = [*([StopAfterThree()] if stops else []), Float8Callback()]
    run = trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=callbacks)
    run.train(resume_from_checkpoint=checkpoint)
    return run


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def whole_and_resumed(recipe, folder, **options):
    whole = trained(recipe, Path(folder) / "whole", **options)
    trained(recipe, Path(folder) / "parts", stops=True, **options)
    checkpoint = str(Path(folder) / "parts" / "checkpoint-3")
    return whole, trained(recipe, Path(folder) / "parts", checkpoint=checkpoint, **options)


def differences(whole, resumed):
    assert losses(whole) == losses(resumed)
    assert losses(whole)[-1] < losses(whole)[0]
    expected, found = ({name: local(t) for name, t in run.model.state_dict().items()} for run in (whole, resumed))
    assert expected.keys() == found.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, recipe):
    whole, resumed = whole_and_resumed(recipe, tmp_path)
    assert differences(whole, resumed) == []
    assert f8.float8_report(whole.model).converted > 0.75
    assert (tmp_path / "parts" / "checkpoint-3" / STATE_FILE).is_file() == (recipe == "tensorwise_delayed")
    one, other = ({k: v for k, v in run.model.named_buffers() if "fp8_" in k} for run in (whole, resumed))
    assert len(one) > 200 or recipe != "tensorwise_delayed"
    assert all(torch.equal(one[name], other[name]) for name in one)
    resumed.model.save_pretrained(tmp_path / "saved")
    loaded(tmp_path / "saved")
    loaded(tmp_path / "parts" / "checkpoint-3")


def sharded(rank, world_size, recipe, folder, ram_efficient, dtype):
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    trainer = type("Chosen", (Sharding,), {"ram_efficient": ram_efficient})
    whole, resumed = whole_and_resumed(recipe, folder, trainer=trainer, dtype=dtype)
    known = {id(p) for group in whole.optimizer.param_groups for p in group["params"]}
    assert known == {id(p) for p in whole.model.parameters()}, "Accelerate's `prepare` leaves sharded parameters there"
    reports = f8.float8_report(whole.model).weights
    converted = [w.wire for w in reports if ".mlp." in w.name or ".self_attn." in w.name]
    return differences(whole, resumed), set(converted), {p.dtype for p in whole.model.parameters()}


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_runs_resume_from_cpu_and_from_meta_in_float32_and_bf16(run_ranks, tmp_path, recipe):
    """`cpu_ram_efficient_loading` shards on the meta device; `Trainer(bf16=True)` makes bf16 parameters float32."""
    for ram_efficient, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        folder = str(tmp_path / f"{ram_efficient}-{dtype}")
        for rank in run_ranks(2, sharded, recipe, folder, ram_efficient, dtype, timeout=400):
            assert rank == ([], {"float8_e4m3fn"}, {torch.float32})


def logged(rank, world_size, folder):
    """Train 6 steps with the callback; the model is sharded by Accelerate's FSDP2."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    model = llama(num_hidden_layers=2)
    f8.convert_to_float8_training(model)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    arguments = TrainingArguments(output_dir=f"{folder}/{rank}", **options, **STEPS)
    numbers = []
    callback = Float8Callback(every=2, scalars=lambda values, step: numbers.append(step))
    Sharding(model=model, args=arguments, train_dataset=Counting(), callbacks=[callback]).train()
    return numbers, whole_weights(model)


def whole_weights(model):
    return {
        name: p.full_tensor().abs().max().item() if hasattr(p, "full_tensor") else p.abs().max().item()
        for name, p in model.named_parameters()
    }


def records(folder):
    return [json.loads(line) for line in (Path(folder) / "fp8.jsonl").read_text().splitlines()]


LAYERS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("first", ["the launch", "the Accelerator", "the conversion"])
def test_fp8_of_accelerate_raises_or_reported(first, monkeypatch):
    """With torchao `prepare` replaces all linear layers but the first and the last, and says nothing."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed: `nox -s ecosystem` installs it")
    own = [accelerate.utils.AORecipeKwargs(config=float8.Float8LinearConfig(emulate=True))]
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier test
    try:
        if first != "the conversion":
            if first == "the launch":
                monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
            else:
                accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=own)
            with pytest.raises(Fp8Error, match="mixed_precision='bf16'"):
                f8.convert_to_float8_training(model)
        else:
            f8.convert_to_float8_training(model)
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=own)
            model = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]
            whys = {weight.name: weight.why for weight in f8.float8_report(model).weights}
            assert whys["1.weight"] == "the FP8 layer was replaced by torchao.float8.float8_linear.Float8Linear"
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_reads_the_file_of_the_guide(tmp_path, monkeypatch):
    """Its launcher and its plugin, without starting a process."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (command,) = re.findall(r"^\$ accelerate launch (.*)$", PAGE.read_text(), re.MULTILINE)
    (tmp_path / "fsdp2.yaml").write_text(text)
    words = command.replace("fsdp2.yaml", str(tmp_path / "fsdp2.yaml")).split()
    arguments, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    assert (arguments.use_fsdp, arguments.num_processes) == (True, 8)
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (2, True, False)


def test_transformers_parses_the_command_of_the_guide_for_gpus(tmp_path, monkeypatch):
    from examples.transformers_trainer import Job

    page = PAGE.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"transformers_trainer\.py (.* --fsdp .*)$", page, re.MULTILINE)
    monkeypatch.setenv("LOCAL_RANK", "-1")
    words = [*shlex.split(command), "--use_cpu"]
    job, arguments = transformers.HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses(words)
    assert (job.model, job.data) == ("Qwen/Qwen3-8B-Base", "tokens.pt")
    assert (arguments.fsdp, arguments.bf16) == (True, True)
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2


def test_the_callback_logs_every_layer_of_a_resumed_run(tmp_path, capsys):
    """The log continues where it was, and `fp8 watch` shows it."""
    for stops, checkpoint in ((True, None), (False, str(tmp_path / "run" / "checkpoint-3"))):
        model = llama(num_hidden_layers=2)
        f8.convert_to_float8_training(model)
        arguments = TrainingArguments(output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, **STEPS)
        callbacks = [Float8Callback(every=2), *([StopAfterThree()] if stops else [])]
        run = Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=callbacks)
        run.train(resume_from_checkpoint=checkpoint)
    written = records(tmp_path / "run")
    assert [record["step"] for record in written] == [1, 2, 4, 6]
    names = {
        f"model.layers.{i}.{layer}/{tensor}"
        for i, layer, tensor in itertools.product(range(2), LAYERS, ("input", "weight", "grad_output"))
    }
    assert all(record["tensors"].keys() == names and record["level"] == "ok" for record in written)
    assert command.main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "step 6: 14 layers, 14 ok" in capsys.readouterr().out


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_the_callback_writes_on_the_first_rank_alone_under_accelerates_fsdp2(run_ranks, tmp_path):
    (first, amax), (second, _) = run_ranks(2, logged, str(tmp_path), timeout=400)
    assert (first, second) == ([1, 2, 4, 6], [])
    assert not (tmp_path / "1" / "fp8.jsonl").exists()
    written = records(tmp_path / "0")
    assert [record["step"] for record in written] == first
    last = written[-1]["tensors"]
    assert len(last) == 2 * len(LAYERS) * 3
    # one step of AdamW with 1e-2 came since the weights were gathered
    for name in (f"model.layers.{i}.{layer}" for i, layer in itertools.product(range(2), LAYERS)):
        assert last[f"{name}/weight"]["amax"] == pytest.approx(amax[f"{name}.weight"], abs=0.011)
