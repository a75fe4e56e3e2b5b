"""The adapter for torchtitan, with torchtitan's own configurations, models and checks."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

REASON = "torchtitan (with Triton, which it imports) is not installed: `nox -s ecosystem` installs both"
pytest.importorskip("torchtitan.models.llama3", reason=REASON, exc_type=ImportError)

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import dense_activation_placement, set_dense_ffn_sharding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry

import fp8_torch_fsdp as f8
from fp8_torch_fsdp.integrations.torchtitan import Float8Converter
from tests.ecosystem.small import train
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.filterwarnings("default")  # others may warn of their own future
RECIPES = ["tensorwise", "rowwise", "tensorwise_delayed"]
PAGE = ROOT / "docs/jobs/torchtitan.md"


def feed_forward(**options):
    init = {"weight": lambda w: torch.nn.init.trunc_normal_(w, std=0.02)}
    w1, w3 = (Linear.Config(in_features=32, out_features=64, param_init=init) for _ in range(2))
    config = FeedForward.Config(w1=w1, w2=Linear.Config(in_features=64, out_features=32, param_init=init), w3=w3)
    return Float8Converter.Config(**options).build().convert(config) if options else config


def fp8_layers(model):
    return sorted(name for name, module in model.named_modules() if isinstance(module, f8.Float8Linear))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise_delayed"])
def test_a_model_of_the_registry_is_built_with_fp8_layers(recipe):
    spec = model_registry("debugmodel", converters=[Float8Converter.Config(recipe=recipe)])
    with torch.device("meta"):
        model, plain = spec.model.build(), model_registry("debugmodel").model.build()
    model.verify_module_protocol()
    layers = fp8_layers(model)
    expected = sorted(n for n, m in plain.named_modules() if isinstance(m, Linear) and n not in ("output", "lm_head"))
    assert layers == expected
    assert len(layers) == 5 * len(model.layers)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(model.get_submodule(name), Linear) for name in layers)
    assert spec.model.to_dict(), "the configuration can still be logged"


def test_filters_choose_layers():
    named = feed_forward(recipe="tensorwise", filter_fqns=["w2"]).build()
    assert fp8_layers(named) == ["w1", "w3"]
    with pytest.raises(ValueError, match=r"No nn\.Linear layer to convert"):
        feed_forward(recipe="tensorwise", skip_small=True).build()


def parallel(rank, world_size, recipe):
    """Train torchtitan's feed-forward under its tensor parallelism, and a twin alone, on the same data."""
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = "cpu"  # torchtitan looks for an accelerator
    torch.manual_seed(0)
    plain = feed_forward(recipe=recipe).build()
    with torch.no_grad():
        plain.init_states(buffer_device=torch.device("cpu"))
    config = feed_forward()
    set_dense_ffn_sharding(config, attn_x_layout=dense_activation_placement(tp=spmd.I), enable_sp=False)
    split = Float8Converter.Config(recipe=recipe).build().convert(config).build()
    split.load_state_dict(plain.state_dict())
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "ep": 1}
    dims = ParallelDims(**degrees, tp=world_size, world_size=world_size, spmd_backend="partial_dtensor")
    dims.build_mesh()
    split.parallelize(dims)
    assert all(isinstance(p, DTensor) for p in split.parameters())
    assert all(isinstance(p._local_tensor, f8.ShardedFloat8Weight) for p in split.parameters())
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))

    def loss_of(model):
        y = model(x[None])
        return ((y.full_tensor() if isinstance(y, DTensor) else y)[0] - x).square().mean()

    found = [train(model, loss_of) for model in (split, plain)]
    kinds = {type(layer.fp8_strategy).__name__ for layer in split.modules() if isinstance(layer, f8.Float8Linear)}
    return found, kinds


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_torchtitans_tensor_parallelism_trains_like_one_process(run_ranks, recipe):
    for (split, plain), kinds in run_ranks(2, parallel, recipe):
        assert kinds == {"Colwise", "Rowwise"}
        assert split == pytest.approx(plain, rel=2e-2)
        assert split[-1] < split[0]


def dispatched(rank, world_size, degrees):
    """Train torchtitan's experts on other ranks, with its own all-to-all and with one of codes; count bytes."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.moe_sharding import expert_param_placement_sparse
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.protocols.sharding import ShardingConfig

    parallel_dims.device_type = "cpu"  # torchtitan looks for an accelerator
    set_spmd_backend("partial_dtensor")
    rest = {"dp_replicate": 1, "cp": 1, "pp": 1, "tp": 1, "world_size": world_size}
    dims = ParallelDims(**rest, **degrees, spmd_backend="partial_dtensor")
    dims.build_mesh()
    names = ("w1_EFD", "w2_EDF", "w3_EFD")
    placement = ShardingConfig(state_shardings={name: expert_param_placement_sparse() for name in names})
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1, 24, 512, generator=generator).bfloat16()
    scores = torch.rand(1, 24, 2, generator=generator)
    chosen = torch.rand(1, 24, 4, generator=generator).topk(2).indices
    counts, found = torch.bincount(chosen.flatten(), minlength=4), []
    for in_codes in (True, False):
        config = RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=512, hidden_dim=48, num_experts=4),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=4, top_k=2),
        )
        config.inner_experts.sharding_config = placement
        options = {"recipe": "rowwise", "dispatch_in_codes": in_codes, "filter_fqns": []}
        model = Float8Converter.Config(**options).build().convert(config).build().bfloat16()
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape) / 8)
        model.parallelize(dims)
        if degrees["dp_shard"] > degrees["ep"]:
            fully_shard(model.inner_experts, mesh=dims.get_mesh("efsdp"))
        own = x.clone().requires_grad_()
        with CollectiveCounter() as counter:
            y = model(own, scores, chosen, counts)
            y.sum().backward()
        sent = [one for one in counter.seen if "alltoall" in one.kind or "all_to_all" in one.kind]
        sizes = torch.tensor([one.nbytes for one in sent if one.elements > 100])
        torch.distributed.all_reduce(sizes)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append({"y": y.detach(), "dx": own.grad, **grads, "sent": sizes})
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}], ids=str)
def test_torchtitans_dispatcher_sends_codes(run_ranks, degrees):
    for codes, plain in run_ranks(degrees["dp_shard"], dispatched, degrees):
        assert torch.equal(codes["y"], plain["y"])
        assert codes.keys() == plain.keys()
        assert all((codes[n] - plain[n]).norm() <= 1e-3 * plain[n].norm() for n in codes if n != "sent")
        assert len(codes["sent"]) == 4
        assert (codes["sent"][::2] <= 0.52 * plain["sent"][::2]).all()
        assert codes["sent"].sum() <= 0.76 * plain["sent"].sum()


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_torchtitans_trainer_resumes_runs_with_the_bits_of_uninterrupted_ones(tmp_path):
    """On two ranks of gloo; in processes of their own, because torchtitan chooses a device when it is imported."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.ecosystem.torchtitan_trainer", str(tmp_path), *RECIPES]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(found) == RECIPES
        for runs in found.values():
            whole, resumed = runs["whole"], runs["resumed"]
            assert whole["losses"][2:] == resumed["losses"]
            assert whole["digest"] == resumed["digest"]
            assert whole["losses"][-1] < whole["losses"][0]
            assert whole["layers"] == whole["gathered"] == 30
        assert len({runs["whole"]["digest"] for runs in found.values()}) == len(RECIPES)


def page_options():
    """Yield the options after `torchtitan.train` of each command of the guide."""
    text = PAGE.read_text().replace("\\\n", "")
    for command in re.findall(r"^\$ torchrun .* -m torchtitan\.train (.*)$", text, re.MULTILINE):
        yield command.replace("--module torchtitan_fp8", "--module examples.torchtitan_fp8").split()


def test_torchtitan_takes_the_commands_of_the_guide():
    from torchtitan.config import ConfigManager

    # options that the guide mentions
    others = re.findall(r"`(--[a-z_.]+(?: \w+)?)`", PAGE.read_text())
    assert len(others) >= 4
    for options in page_options():
        config = ConfigManager().parse_args([*options, *" ".join(others).split()])
        with torch.device("meta"):
            model = config.model_spec.model.build()
        assert len(fp8_layers(model)) > 4 * len(model.layers)
        assert config.parallelism.spmd_backend == "partial_dtensor"
        assert config.training.disable_cuda_graphs
        assert config.compile.enable


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_torchtitans_own_main_trains_the_debug_model_of_the_guide(tmp_path):
    """Compiled, with its own loss in chunks and its own selective activation checkpointing."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    model = ["--module", "examples.torchtitan_fp8", "--config", "llama3_debugmodel_fp8"]
    options = ["--compile.enable", "--compile.backend", "aot_eager", "--training.steps", "6"]
    command = [*launcher, "-m", "tests.ecosystem.torchtitan_main", *model, *options, "--dump_folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d loss (.*)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] - 1
    assert "82.9% of the weights converted, 82.9% gathered in FP8" in done.stdout
