"""The guides of docs/jobs: their programs are examples that tests run, and what they say can be read from its source.

Commands of other libraries are parsed by these in tests/ecosystem.
"""

import json
import re
import shlex

import pytest
import torch
from torch import nn

from tests.helpers import programs
from tests.helpers.repository import ROOT

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs/jobs").glob("*.md"))}
RECORD = ROOT / "benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json"


def commands(page):
    """Yield the commands of a page, as lists of words."""
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line.removeprefix("$ "))


def test_programs_of_the_pages_are_examples_that_run():
    from tests.ecosystem import test_with_examples

    run = {name.partition(",")[0] for name in test_with_examples.COMMANDS}
    run |= {"torchtitan_fp8.py"}  # tests/ecosystem/test_with_torchtitan.py
    every = "\n".join(PAGES.values())
    included = set(re.findall(r'^``` {\.python}\n--8<-- "examples/(\w+\.py)"\n```$', every, re.MULTILINE))
    assert len(included) == 3 == every.count("{.python}")
    assert included <= run


def test_commands_start_examples_that_exist_with_options_that_they_have():
    seen = 0
    for words in (words for page in PAGES.values() for words in commands(page)):
        for position, word in enumerate(words):
            if not word.startswith("examples/"):
                continue
            source, seen = (ROOT / word).read_text(), seen + 1
            options = [one for one in words[position + 1 :] if one.startswith("--")]
            if word == "examples/transformers_trainer.py":  # the others are parsed by Transformers
                options = [one for one in options if one in ("--model", "--data", "--recipe")]
                source = re.sub(r"^    (\w+): str", r'"--\1"', source, flags=re.MULTILINE)
            assert [one for one in options if f'"{one}"' not in source] == [], word
    assert seen == 7


def test_pods_meet_at_a_pod_that_exists_and_start_an_example_with_its_options():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all((ROOT / "examples/train_fsdp2.k8s.yaml").read_text())
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = dict(word.removeprefix("--").partition("=")[::2] for word in container["command"])
    assert words["rdzv-endpoint"].partition(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert int(words["nnodes"]) == spec["completions"] == spec["parallelism"] == int(words["replicas"])
    assert int(words["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    example = container["command"].index("examples/train_fsdp2.py")
    source = (ROOT / container["command"][example]).read_text()
    options = [word.partition("=")[0] for word in container["command"][example + 1 :]]
    assert [one for one in options if f'"{one}"' not in source] == []
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_table_of_layers_is_that_of_the_record():
    figures, rows = json.loads(RECORD.read_text())["parts"]["layers"]["figures"], []
    for label, count in (("Llama-3-8B", "8,192"), ("TE", "15,872")):
        for key, times in figures.items():
            if key.startswith(f"ours-tensorwise: {label} "):
                layer = key.removeprefix(f"ours-tensorwise: {label} ")
                other = figures[f"ours-rowwise: {label} {layer}"]
                shares = times["bf16"] / times["ours-tensorwise"], other["bf16"] / other["ours-rowwise"]
                rows.append(f"| {layer} | {count} | {shares[0]:.2f}x | {shares[1]:.2f}x |")
    assert len(rows) == 8
    assert sorted(re.findall(r"^\| \d+ -> .*$", PAGES["launch"], re.MULTILINE)) == sorted(rows)


def test_codes_that_jax_exports_are_those_of_torch():
    pytest.importorskip("jax", reason="JAX is not installed")
    from safetensors.torch import load_file

    from fp8_common import CastRecipe
    from fp8_common.torch_layers.export import serving_state_dict

    (block,) = re.findall(r"```python\n(import tempfile\n.*?)```", PAGES["launch"], re.DOTALL)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(3)) / 3
    weight[3, 5] = 7.3
    given = f"params = {{'kernel': jnp.array({weight.T.tolist()})}}\nkernels ="
    *_, path = programs.run(block.replace("kernels =", given) + "print(path)\n", "export").split()
    (found,) = ({name.removeprefix("model.layers.0.mlp."): x for name, x in load_file(path).items()},)
    model = nn.ModuleDict({"down_proj": nn.Linear(256, 128, bias=False)})
    model["down_proj"].weight.data = weight
    wanted = serving_state_dict(model, {"down_proj": CastRecipe()}, "compressed-tensors")
    assert found.keys() == wanted.keys() == {"down_proj.weight", "down_proj.weight_scale"}
    assert all(torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted)
