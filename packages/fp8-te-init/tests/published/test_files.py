"""Published checkpoints on one process: layouts, bytes, refusals, and what a published weight does."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import published_files as made
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch import casts
from fp8_te_init import memory_report
from fp8_te_init.published import PublishedWeight, convert_published, load_published, save_published
from fp8_te_init.published import files as files_module
from fp8_te_init.published import weight as weight_module
from fp8_te_init.published.files import Checkpoint
from fp8_te_init.published.layers import PublishedLinear
from fp8_te_init.published.weight import operand_of, published_of
from published_files import LAYOUTS, MOE, ODD, tensors_of, values_of, write, write_tensors
from published_models import ATTENTION, Llama, adapt, batch, draw_adapters, fill_twin, loss_of
from tests.helpers.tensors import same

CONFIGS = {"odd": ODD, "moe": MOE}
LAYER = "model.layers.0.self_attn.q_proj"


def loaded(folder, config=ODD, **options):
    model = Llama(config)
    load_published(model, folder, **options)
    return model


def published(model):
    return {name: weight for name, p in model.named_parameters() if (weight := published_of(p)) is not None}


def parts(model):
    """Yield (name in the file, float8 codes, scales) of every matrix, by the names that the tests write."""
    for name, weight in published(model).items():
        if weight.ndim == 2:
            yield name, weight.codes, weight.scale_inv
            continue
        above, _, last = name.rpartition(".")
        split = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert in range(weight.shape[0]):
            for part, codes, scale in zip(
                split, weight.codes[expert].chunk(len(split)), weight.scale_inv[expert].chunk(len(split)), strict=True
            ):
                yield f"{above}.{expert}.{part}.weight", codes, scale


def same_files(a, b):
    names = sorted(file.name for file in a.iterdir())
    assert sorted(file.name for file in b.iterdir()) == names
    return [name for name in names if (a / name).read_bytes() != (b / name).read_bytes()]


@pytest.mark.matrix(config=list(CONFIGS), layout=list(LAYOUTS), shards=[1, 3])
def test_codes_and_scales_are_those_of_the_file_and_a_save_gives_equal_files(tmp_path, config, layout, shards):
    folder = write(tmp_path / "in", CONFIGS[config], layout, shards=shards)
    model = loaded(folder, CONFIGS[config])
    tensors, seen = tensors_of(folder), 0
    for name, codes, scale in parts(model):
        layer = name.removesuffix(".weight")
        kept = tensors[f"{layer}.{LAYOUTS[layout][1]}"]
        assert same(codes, tensors[name]), name
        scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        assert scale.dtype == kept.dtype
        # a stack keeps the one scale of a matrix for each of its rows
        own = scale.reshape(-1)[: kept.numel()]
        assert same(own, kept.reshape(-1)), name
        assert len(scale.float().unique()) == len(own.float().unique())
        seen += 1
    assert seen == sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    save_published(model, tmp_path / "out", folder)
    assert same_files(folder, tmp_path / "out") == []


@pytest.mark.matrix(config=list(CONFIGS), layout=list(LAYOUTS))
def test_adapters_get_the_gradients_of_a_dequantized_twin_bit_for_bit(tmp_path, config, layout):
    folder = write(tmp_path, CONFIGS[config], layout)
    model, twin = loaded(folder, CONFIGS[config]), fill_twin(Llama(CONFIGS[config]).to_empty(device="cpu"), folder)
    results = []
    for net in (model, twin):
        draw_adapters(adapt(net))
        loss = loss_of(net, batch(0))
        loss.backward()
        results.append((loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)))
    assert len(results[0]) == (17 if config == "moe" else 29)
    assert all(map(same, *results))
    assert all(grad.any() for grad in results[0])


def test_a_scale_that_is_no_reciprocal_stays_what_it_is(tmp_path):
    """Kept as scales into FP8, one of six would come back as its neighbour."""
    scale = torch.linspace(1, 2, 288)[:, None]
    changed = casts.reciprocal(casts.reciprocal(scale)) != scale
    assert 0.1 < changed.float().mean() < 0.25
    folder = write(tmp_path, ODD, "compressed-channel")
    tensors = tensors_of(folder) | {f"{LAYER}.weight_scale": scale}
    write_tensors(folder, tensors, json.loads((folder / "config.json").read_text()))
    weight = published(loaded(folder))[f"{LAYER}.weight"]
    assert same(weight.scale_inv, scale)
    assert same(operand_of(weight).scale_inv, scale)
    assert same(weight.dequantize(), values_of(tensors, f"{LAYER}.weight"))


def test_what_the_file_does_not_quantize_loads_as_usual(tmp_path):
    folder = write(tmp_path, ODD, "qwen")
    tensors = tensors_of(folder)
    plain = torch.randn(288, 256).bfloat16()
    del tensors[f"{LAYER}.weight_scale_inv"]
    write_tensors(folder, tensors | {f"{LAYER}.weight": plain}, json.loads((folder / "config.json").read_text()))
    model = loaded(folder)
    layer = model.get_submodule(LAYER)
    assert type(layer) is nn.Linear
    assert same(layer.weight.detach(), plain)
    assert same(model.model.embed_tokens.weight.detach(), tensors["model.embed_tokens.weight"])
    assert len(published(model)) == 13


def test_stacks_are_read_unchanged_where_the_file_has_them(tmp_path):
    config = MOE | {"num_hidden_layers": 1}
    tensors = tensors_of(write(tmp_path / "single", config))
    twin = loaded(tmp_path / "single", config)
    for name, weight in published(twin).items():
        if weight.ndim == 3:
            tensors[name], tensors[f"{name}_scale_inv"] = weight.codes.clone(), weight.scale_inv.clone()
    tensors = {name: tensor for name, tensor in tensors.items() if not any(f".experts.{e}." in name for e in range(5))}
    folder = write_tensors(tmp_path / "stacked", tensors, config | {"quantization_config": made.FP8})
    model = loaded(folder, config)
    assert same(model(batch(0)).detach(), twin(batch(0)).detach())
    save_published(model, tmp_path / "out", folder)
    assert same_files(folder, tmp_path / "out") == []


def changed(folder, change):
    """Write a checkpoint again, of which `change` edits tensors and config."""
    tensors, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    write_tensors(folder, tensors, config)


def packed(tensors, config):
    tensors[f"{LAYER}.weight"] = torch.zeros(288, 128, dtype=torch.uint8)


def other_format(tensors, config):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float().to(torch.float8_e5m2)


def no_scale(tensors, config):
    del tensors[f"{LAYER}.weight_scale_inv"]


def scales_of_another_layer(tensors, config):
    tensors[f"{LAYER}.weight_scale_inv"] = torch.ones(2, 2)


def integer_scales(tensors, config):
    tensors[f"{LAYER}.weight_scale_inv"] = torch.ones(3, 2, dtype=torch.int32)


def other_shape(tensors, config):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:, :200].contiguous()


def other_blocks(tensors, config):
    config["quantization_config"]["weight_block_size"] = [64, 64]


def fp8_embeddings(tensors, config):
    codes, scale = made.quantize(tensors["model.embed_tokens.weight"].float(), "tensor", torch.float32)
    tensors |= {"model.embed_tokens.weight": codes, "model.embed_tokens.weight_scale": scale}


def fp8_norm_alone(tensors, config):
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (packed, rf"{LAYER}: codes of U8"),
        (other_format, rf"{LAYER}: codes of F8_E5M2"),
        (no_scale, rf"{LAYER} has FP8 codes and no scales"),
        (scales_of_another_layer, rf"{LAYER}: codes \[288, 256\] cannot be loaded with scales \[2, 2\]"),
        (integer_scales, rf"{LAYER}: .* of I32"),
        (other_shape, rf"{LAYER}.weight is \[288, 200\] in the file; \[288, 256\]|cannot be loaded with scales"),
        (other_blocks, r"weight_block_size=\[64, 64\]"),
        (fp8_embeddings, r"model.embed_tokens.weight of a Embedding has FP8 codes"),
        (fp8_norm_alone, r"model.norm.weight is not in"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_loaded_raises_with_its_name(tmp_path, change, message):
    folder = write(tmp_path)
    changed(folder, change)
    with pytest.raises(Fp8Error, match=message):
        loaded(folder)


def test_stacks_whose_halves_share_a_block_raise_by_name(tmp_path):
    config = MOE | {"moe_intermediate_size": 96}
    folder = write(tmp_path, config)
    with pytest.raises(Fp8UnsupportedError, match=r"model.layers.0.mlp.experts.gate_up_proj: 96 rows are no whole"):
        loaded(folder, config)


def test_a_mistake_is_an_error_that_says_what_to_do(tmp_path):
    folder = write(tmp_path / "in", ODD, "ministral")
    with pytest.raises(Fp8UnsupportedError, match='static activation scales: use multiply="decoded"'):
        convert_published(Llama(ODD), folder, multiply="fp8")
    with pytest.raises(Fp8Error, match="multiply must be one of"):
        convert_published(Llama(ODD), folder, multiply="wide")
    with pytest.raises(Fp8Error, match=r"has no FP8 codes for a layer of this model. Do the names differ\?"):
        convert_published(Llama(ODD), folder, rename=lambda name: f"language.{name}")
    model = loaded(folder)
    with pytest.raises(Fp8Error, match="is the checkpoint that was loaded"):
        save_published(model, folder, folder)
    model = Llama(ODD)
    model.model.register_buffer("inv_freq", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(Fp8Error, match=r"The buffer model.inv_freq is on the meta device.*type\(model.model\)"):
        load_published(model, folder)
    file = folder / "model-00002-of-00003.safetensors"
    whole = file.read_bytes()
    for cut, message in ((whole[:-7], "is cut off"), (b"PK" + whole[2:], "safetensors header")):
        file.write_bytes(cut)
        with pytest.raises(Fp8Error, match=message):
            loaded(folder)
    file.unlink()
    with pytest.raises(Fp8Error, match=r"00002-of-00003.safetensors is named in .* and missing"):
        loaded(folder)


def test_codes_are_frozen_and_follow_moves_and_copies(tmp_path):
    model = loaded(write(tmp_path))
    layer = model.get_submodule(LAYER)
    before, values = layer.weight.codes.clone(), layer.weight.dequantize()
    for write_to in (lambda w: w.copy_(values + 1), lambda w: w.mul_(2), nn.init.normal_, lambda w: w.zero_()):
        with torch.no_grad(), pytest.raises(Fp8Error, match="published FP8 weight, whose codes belong to its file"):
            write_to(layer.weight)
    assert same(layer.weight.codes, before)
    twin = copy.deepcopy(layer)
    assert same(twin.weight.codes, before)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    twin.float()
    assert (twin.weight.dtype, type(twin.weight)) == (torch.float32, PublishedWeight)
    assert same(twin.weight.dequantize().bfloat16(), values)
    assert same(twin.weight.codes, before)
    assert not torch.equal(twin.weight.dequantize(), values.float()), "float32 values are not rounded to bfloat16"
    with pytest.raises(Fp8UnsupportedError, match="cannot be pickled"):
        torch.save(layer.weight, tmp_path / "weight.pt")
    assert same((layer.weight * 1).detach(), values)
    assert same(layer.weight.detach().view(torch.int16), values.view(torch.int16))
    assert same(layer.weight[3:7, ::2].t().contiguous().detach(), values[3:7, ::2].t().contiguous())


def test_state_dicts_hold_codes_with_their_scales_and_load_into_a_converted_model(tmp_path):
    folder = write(tmp_path / "in")
    model, other = loaded(folder), loaded(write(tmp_path / "other", seed=1))
    state = model.state_dict()
    tensors = tensors_of(folder)
    assert set(state) == set(tensors), "the names of DeepSeek's layout"
    assert state[f"{LAYER}.weight"].shape == (288, 1, 256), "which no other model takes for values"
    assert all(same(state[name].squeeze(), tensors[name].view(state[name].dtype)) for name in tensors)
    torch.save(state, tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(same(a, b) for a, b in zip(other.state_dict().values(), state.values(), strict=True))
    assert same(other(batch(0)).detach(), model(batch(0)).detach())
    again = loaded(write(tmp_path / "again", seed=1))
    again.load_state_dict(tensors)
    assert same(again(batch(0)).detach(), model(batch(0)).detach())
    with pytest.raises(RuntimeError, match="size mismatch"):
        Llama(ODD, device="cpu").load_state_dict(state, strict=False)
    del state[f"{LAYER}.weight_scale_inv"]
    with pytest.raises(Fp8Error, match=rf"{LAYER}.weight holds FP8 codes, and .* is missing"):
        other.load_state_dict(state)
    with pytest.raises(Exception, match="whose codes belong to its file"):
        other.load_state_dict(
            fill_twin(Llama(ODD).to_empty(device="cpu"), tmp_path / "other").state_dict(), strict=False
        )


def test_one_byte_for_each_weight_is_resident_and_no_values_are_kept_for_the_backward(tmp_path):
    model = adapt(loaded(write(tmp_path)))
    weights = published(model)
    elements = sum(weight.numel() for weight in weights.values())
    held = {
        w.stored.codes.untyped_storage().data_ptr(): w.stored.codes.untyped_storage().nbytes() for w in weights.values()
    }
    scales = sum(weight.scale_inv.nbytes for weight in weights.values())
    assert sum(held.values()) == elements
    other = sum(2 * p.numel() for p in model.parameters() if published_of(p) is None)
    assert memory_report(model).other_parameters == elements + other
    assert scales == 4 * sum(math.prod(-(-size // 128) for size in weight.shape) for weight in weights.values())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss_of(model, batch(0)).backward()
    assert sum(isinstance(tensor, PublishedWeight) for tensor in kept) == len(weights) - 3, (
        "none where no x needs a gradient"
    )
    shapes = {weight.shape for weight in weights.values()} | {weight.shape[::-1] for weight in weights.values()}
    wide = [tensor.shape for tensor in kept if not isinstance(tensor, PublishedWeight) and tensor.shape in shapes]
    assert wide == []


def test_a_weight_is_decoded_once_for_each_matmul_and_experts_only_if_they_are_hit(tmp_path, monkeypatch):
    model, decoded = adapt(loaded(write(tmp_path, MOE), MOE), ()), []
    true = weight_module._decode
    monkeypatch.setattr(
        weight_module, "_decode", lambda codes, *rest: decoded.append(codes.numel()) or true(codes, *rest)
    )
    x = torch.randn(1, 2, 256, dtype=torch.bfloat16, requires_grad=True)
    layer = model.model.layers[0]
    with torch.no_grad():
        hit = layer.mlp.gate(x.flatten(0, 1)).float().softmax(-1).topk(2, -1)[1].unique().numel()
    y = layer.mlp(x)
    assert decoded == [2 * 128 * 256, 128 * 256] * hit
    decoded.clear()
    y.sum().backward()
    assert sorted(decoded) == sorted([2 * 128 * 256, 128 * 256] * hit)


def test_loading_holds_one_tensor_of_the_file_at_a_time(tmp_path, monkeypatch):
    folder, alive, most = write(tmp_path), set(), []
    true = files_module.np.fromfile

    class Read(files_module.np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    def read(*args, **options):
        array = true(*args, **options).view(Read)
        alive.add(id(array))
        most.append(len(alive))
        return array

    monkeypatch.setattr(files_module.np, "fromfile", read)
    loaded(folder)
    assert len(most) == len(tensors_of(folder))
    assert max(most) <= 2, "the last one lives until the name that holds it is taken by the next"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_no_values(tmp_path, dtype):
    layer = loaded(write(tmp_path)).get_submodule(LAYER).to(dtype)
    twin = nn.Linear(256, 288, bias=False, dtype=dtype)
    twin.weight.data.copy_(layer.weight.dequantize())
    x = torch.randn(4, 256, requires_grad=True)
    kept, results = [], []
    for one in (layer, twin.requires_grad_(False)):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
        with torch.autocast("cpu", torch.bfloat16), hooks:
            y = one(x)
        y.float().sum().backward()
        results.append((y.detach(), x.grad.clone()))
        x.grad = None
        if one is layer:
            assert [type(tensor) for tensor in kept] == [PublishedWeight]
    assert all(map(same, *results))


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_added_as_a_plain_layer_adds_it(tmp_path, bias):
    folder = write(tmp_path)
    tensors = tensors_of(folder)
    given = {"weight": tensors[f"{LAYER}.weight"], "weight_scale_inv": tensors[f"{LAYER}.weight_scale_inv"]}
    given |= {"bias": torch.randn(288).bfloat16()} if bias else {}
    folder = write_tensors(tmp_path / "layer", given, {"quantization_config": made.FP8}, shards=1)
    model = nn.Linear(256, 288, bias=bias, device="meta", dtype=torch.bfloat16)
    load_published(model, folder)
    assert type(model) is PublishedLinear
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    assert same(y.detach(), F.linear(x, values_of(given, "weight"), given.get("bias")).detach())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_around_published_layers_gradients_are_equal(tmp_path, backend):
    folder = write(tmp_path)
    mlp = draw_adapters(adapt(loaded(folder))).model.layers[0].mlp
    x = torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for run in (mlp, torch.compile(mlp, backend=backend)):
        for _ in range(2):
            y = run(x)
            x.grad = None
            mlp.zero_grad()
            y.float().square().mean().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)])
    if backend == "aot_eager":
        assert all(map(same, *results))
    assert all(torch.allclose(a, b, rtol=0.05, atol=1e-3) for a, b in zip(*results, strict=True))
    assert len(results[0]) == 8


def test_headers_alone_are_read_to_convert(tmp_path):
    folder = write(tmp_path)
    model = Llama(ODD)
    names = convert_published(model, folder)
    assert len(names) == 14
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {PublishedLinear, nn.Linear}
    assert type(model.lm_head) is nn.Linear
    assert Checkpoint(folder).bytes_read == 0
    assert "published=blockwise, multiply=decoded" in repr(model.get_submodule(LAYER))


def test_adapters_leave_stacks_of_experts_alone(tmp_path):
    model = loaded(write(tmp_path, MOE), MOE)
    experts = model.model.layers[0].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity(), unsafe=True)
    experts.parametrizations["gate_up_proj"][0].forward = lambda weight: weight + 1
    with pytest.raises(Fp8UnsupportedError, match=r"model.layers.0.mlp.experts.gate_up_proj was replaced: adapters"):
        model(batch(0))


def test_attention_targets_are_what_adapters_take_in_a_mixture_of_experts(tmp_path):
    model = draw_adapters(adapt(loaded(write(tmp_path, MOE), MOE), ATTENTION))
    loss_of(model, batch(0)).backward()
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 16


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_the_file_has_are_loaded_and_others_stay(tmp_path, persistent):
    folder = write(tmp_path / "in")
    bias = torch.randn(256)
    write_tensors(folder, tensors_of(folder) | {"model.bias": bias}, json.loads((folder / "config.json").read_text()))
    model = Llama(ODD)
    model.model.register_buffer("bias", torch.empty(256, device="meta"), persistent=persistent)
    model.model.register_buffer("inv_freq", torch.arange(3.0), persistent=persistent)
    load_published(model, folder)
    assert same(model.model.bias, bias)
    assert model.model.inv_freq.tolist() == [0, 1, 2]
    save_published(model, tmp_path / "out", folder)
    assert same_files(folder, tmp_path / "out") == []


def test_values_are_taken_if_they_are_its_own_alone(tmp_path):
    weight = published_of(loaded(write(tmp_path)).get_submodule(LAYER).weight)
    with torch.no_grad():
        before, values = weight.codes.clone(), weight.dequantize()
        weight.copy_(values)
        assert same(weight.codes, before)
        for other in (values + 1, values.float()):
            with pytest.raises(Fp8Error, match="from another tensor would be copied to a published FP8 weight"):
                weight.copy_(other)
