"""Private names of torch, JAX and others stand in one file of a package each, and nowhere else."""

import ast
from collections import defaultdict

from tests.helpers.repository import packages

COMPAT = {
    "fp8_common/torch/compat.py": "torch",
    "fp8_common/torch_layers/sharding/fsdp.py": "FSDP2",
    "fp8_common/torch_layers/sharding/fsdp_forwards.py": "FSDP2's forwards and autograd's backwards",
    "fp8_common/jax/compat.py": "JAX",
    "fp8_jax_owg/state/cotangents.py": "JAX's extended dtypes",
    "fp8_torch_fsdp/_compat.py": "torch's collectives and DDP",
    "fp8_torch_fsdp/convert/expert_layouts.py": "the experts of Transformers",
    "fp8_te_init/transformer_engine.py": "TransformerEngine",
}
MODULE = {"_parameters", "_buffers", "_modules"}
"""Attributes of `nn.Module` that its documentation of subclassing takes for granted."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names():
    """Return the foreign private names that the sources use, with the files that do.

    Foreign is what no source of these packages defines; operators behind `aten.` have such names by torch's habit.
    """
    nodes = {
        str(path.relative_to(package.source.parent)): list(ast.walk(ast.parse(path.read_text())))
        for package in packages().values()
        for path in package.source.rglob("*.py")
    }
    own, used = set(MODULE), defaultdict(set)
    for node in (node for of_file in nodes.values() for node in of_file):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
    for file, of_file in nodes.items():
        for node in of_file:
            match node:
                case ast.ImportFrom(module=str(module), names=names) if not module.startswith("fp8_"):
                    found = [*module.split("."), *(alias.name for alias in names)]
                case ast.Import(names=names):
                    found = [part for alias in names for part in alias.name.split(".")]
                case ast.Attribute(value=ast.Name(id="aten") | ast.Attribute(attr="aten")):
                    continue
                case ast.Attribute(attr=name):
                    found = [name]
                case _:
                    continue
            for name in found:
                if is_private(name) and name not in own:
                    used[name].add(file)
    return used


def test_private_names_stand_in_one_file_of_each_package():
    used = private_names()
    stray = {name: sorted(files - set(COMPAT)) for name, files in used.items() if files - set(COMPAT)}
    assert stray == {}, "Put it behind a compat file, with a test of what it means."
    assert set(COMPAT) == set().union(*used.values()), "This file needs nothing private any more."
