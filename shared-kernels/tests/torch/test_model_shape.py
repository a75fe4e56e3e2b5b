"""Sizes of models read off torch modules, and `fp8 advise --module`."""

import json

import pytest
import torch
from torch import nn

from fp8_common import Fp8Error, _cli
from fp8_common.torch import model_shape


class Experts(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.up = nn.Parameter(torch.empty(number, 3 * width, width))
        self.down = nn.Parameter(torch.empty(number, width, 3 * width))


class Block(nn.Module):
    def __init__(self, width, experts=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Linear(width, 4 * width) if experts is None else experts


class Decoder(nn.Module):
    def __init__(self, blocks, width=8, tied=False, **options):
        super().__init__()
        self.table, self.positions = nn.Embedding(100, width), nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(blocks))
        self.head = nn.Linear(width, 100, bias=False)
        if tied:
            self.head.weight = self.table.weight


def test_blocks_embedding_and_head_are_found():
    shape = model_shape(Decoder(3))
    assert (shape.blocks, shape.width, shape.vocabulary, shape.tied) == (3, 8, 100, False)
    assert shape.linear == ((24, 8), (32, 8))
    assert model_shape(Decoder(3, tied=True)).tied


def test_a_module_without_a_list_is_one_block():
    shape = model_shape(nn.Linear(4, 6))
    assert (shape.blocks, shape.linear, shape.vocabulary) == (1, ((6, 4),), 0)


def test_stacked_and_listed_experts_are_experts():
    stacked = model_shape(Decoder(2, experts=Experts(4, 8)), active=2)
    assert (stacked.expert, stacked.experts, stacked.active) == (((24, 8), (8, 24)), 4, 2)
    assert stacked.linear == ((24, 8),)
    listed = nn.Module()
    listed.experts, listed.top_k = nn.ModuleList(nn.Linear(8, 16) for _ in range(4)), 1
    shape = model_shape(Decoder(2, experts=listed))
    assert (shape.expert, shape.experts, shape.active) == (((16, 8),), 4, 1)
    with pytest.raises(Fp8Error, match="Give --active"):
        model_shape(Decoder(2, experts=Experts(4, 8)))


def test_a_module_without_matrices_is_refused():
    with pytest.raises(Fp8Error, match="no matrices"):
        model_shape(nn.LayerNorm(4))


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A package in the folder from which the command is called."""
    (tmp_path / "models_of_a_test.py").write_text(
        "from torch import nn\n"
        "import torch\n"
        "def stack():\n"
        "    return nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(4)))\n"
        "def text():\n"
        "    return 'a text'\n"
        "def broken():\n"
        "    return nn.Linear(int(torch.ones(1)), 1)\n"
    )
    monkeypatch.chdir(tmp_path)


def test_the_command_reads_a_module_without_memory(here, capsys):
    assert _cli.main(["advise", "--module", "models_of_a_test:stack", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 4 << 40


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("models_of_a_test", "takes package.module:factory"),
        ("models_of_a_test:none", "cannot be built on the meta device: AttributeError"),
        ("no_such_module:none", "cannot be built on the meta device: ModuleNotFoundError"),
        ("models_of_a_test:broken", "cannot be built on the meta device: RuntimeError"),
        ("models_of_a_test:text", "must return a torch.nn.Module, got str"),
    ],
)
def test_a_module_that_is_none_is_refused_in_one_sentence(here, capsys, path, part):
    assert _cli.main(["advise", "--module", path]) == 2
    told = capsys.readouterr().err
    assert part in told
    assert told.count("\n") == 1
