"""Every layout for serving engines decodes to the bits of this package's own dequantization, or is refused."""

import json

import numpy as np
import pytest

import fp8_common as f8
from fp8_common import _safetensors as files
from fp8_common._serving_layouts import LAYOUTS, scales_of_elements, serving_layout

SHAPE = (200, 160)
GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128")


def quantized(granularity, policy=f8.CANONICAL, shape=SHAPE):
    x = (np.random.default_rng(3).standard_normal(shape) * np.geomspace(1e-4, 10, shape[0])[:, None]).astype(np.float32)
    if granularity == "mx":
        codes, scale = f8.quantize_mx(x, "e4m3")
        return codes, scale, f8.dequantize_mx(codes, scale, "e4m3")
    if granularity == "blockwise_128x128":
        codes, scale = f8.quantize_blockwise(x, "e4m3", (128, 128), policy)
        return codes, scale, f8.dequantize_blockwise(codes, scale, "e4m3", (128, 128))
    if granularity == "rowwise":
        codes, scale = f8.quantize_rowwise(x, "e4m3", policy=policy)
    else:
        scale = f8.amax_to_scale(f8.amax(x), "e4m3", policy)
        codes = f8.quantize(x, scale, "e4m3")
    return codes, scale, f8.dequantize(codes, scale, "e4m3")


def write(folder, layout, granularity, policy=f8.CANONICAL):
    codes, scale, values = quantized(granularity, policy)
    stored = layout.stored_scales(scale, granularity, SHAPE, "a.weight")
    tensors = {"a.weight": ("F8_E4M3", SHAPE), "a.weight" + layout.suffix: (layout.scale_dtype, stored.shape)}
    (file,), places = files.plan_files(tensors, {}, 1 << 30)
    content = bytearray(file.size)
    content[: len(file.header)] = file.header
    for name, data in (("a.weight", codes), ("a.weight" + layout.suffix, stored)):
        place = places[name]
        content[place.offset : place.offset + place.nbytes] = np.ascontiguousarray(data).tobytes()
    folder.mkdir(exist_ok=True)
    (folder / file.name).write_bytes(content)
    return values


CASES = [
    *(("compressed-tensors", granularity, f8.CANONICAL) for granularity in GRANULARITIES),
    ("deepseek", "blockwise_128x128", f8.CANONICAL),
    ("deepseek", "tensorwise", f8.CANONICAL),
    ("mx", "mx", f8.CANONICAL),
    *(("mx", granularity, f8.POWER_OF_2) for granularity in GRANULARITIES),
]


@pytest.mark.parametrize(("layout", "granularity", "policy"), CASES)
def test_what_is_stored_decodes_to_the_bits_of_dequantize(tmp_path, layout, granularity, policy):
    values = write(tmp_path, serving_layout(layout), granularity, policy)
    read = f8.read_for_serving(tmp_path)
    assert list(read) == ["a.weight"]
    assert read["a.weight"].values().tobytes() == values.tobytes()


def test_what_a_layout_cannot_express_is_refused():
    deepseek, mx = serving_layout("deepseek"), serving_layout("mx")
    with pytest.raises(f8.Fp8Error, match=r"'deepseek' cannot express rowwise scales, which a.weight"):
        deepseek.granularity_of("rowwise", "a.weight")
    _, scale, _ = quantized("rowwise")
    with pytest.raises(f8.Fp8Error, match="scales that are no powers of two"):
        mx.stored_scales(scale, "rowwise", SHAPE, "a.weight")
    with pytest.raises(f8.Fp8Error, match="33 columns, and the layout 'mx' needs multiples of 32"):
        mx.stored_scales(scale, "rowwise", (200, 33), "a.weight")
    with pytest.raises(f8.Fp8Error, match=r"one of 'compressed-tensors', 'deepseek', 'mx', got 'gguf'\."):
        serving_layout("gguf")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_configs_are_json_and_name_their_groups(layout):
    groups = {kind: [f"{kind}.a"] for kind in layout.granularities}
    config = json.loads(json.dumps(layout.config(groups, ["lm_head"])))
    if layout.name == "deepseek":
        assert config["weight_block_size"] == [128, 128]
        assert config["modules_to_not_convert"] == ["lm_head"]
        return
    assert config["ignore"] == ["lm_head"]
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert targets == ([["Linear"]] if len(groups) == 1 else list(groups.values()))


def test_files_are_split_and_aligned():
    tensors = {"a": ("U8", (3,)), "b": ("F32", (2, 2)), "c": ("BF16", (5,)), "d": ("F32", ())}
    listed, places = files.plan_files(tensors, {}, 20)
    assert [file.name for file in listed] == [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name, place in places.items():
        assert place.offset % files.DTYPES[place.dtype].itemsize == 0, name
    assert files.index_of(places.items())["metadata"]["total_size"] == 3 + 16 + 10 + 4


def test_a_cut_or_damaged_file_is_refused(tmp_path):
    write(tmp_path, serving_layout("deepseek"), "blockwise_128x128")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 5, 60, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(f8.Fp8Error, match="cut off"):
            f8.read_for_serving(tmp_path)
    file.write_bytes(content[:8] + b"]" + content[9:])
    with pytest.raises(f8.Fp8Error, match="damaged"):
        f8.read_for_serving(file)
    with pytest.raises(f8.Fp8Error, match="There is no checkpoint"):
        f8.read_for_serving(tmp_path / "nowhere")


def test_scales_of_another_shape_belong_to_nothing():
    with pytest.raises(f8.Fp8Error, match="must have shape"):
        scales_of_elements(np.ones((7, 3), np.float32), SHAPE)
