"""The measurement of router agreement: what it counts, and that the guide has what the file has."""

import json

import pytest
import torch
from torch import nn

from benchmarks import router_agreement as measured
from demos.common.corpus import load_corpus
from fp8_torch_fsdp import Float8Experts, Float8Linear


def test_the_table_is_that_of_the_file():
    kept = json.loads(measured.RESULT.read_text())
    assert measured.table(kept) in measured.PAGE.read_text()
    assert {row["way"] for row in kept["rows"]} == set(measured.WAYS)


def test_a_token_counts_once_however_many_of_its_experts_changed():
    wanted = torch.tensor([[[0, 1], [2, 3], [4, 5], [6, 7]]])
    found = torch.tensor([[[0, 1], [2, 4], [8, 9], [6, 7]]])
    assert measured.changed(wanted, found) == [0.5]


@pytest.mark.parametrize("way", [way for way in measured.WAYS if way != "bf16"])
def test_a_way_converts_what_it_says(way):
    low = measured.converted(measured.Model(), way)
    mixture = low.blocks[0].mixture
    routers, others = "but" not in way, "alone" not in way
    assert isinstance(mixture.router, Float8Linear) == routers
    assert isinstance(mixture.experts, Float8Experts) == others
    assert isinstance(low.head, Float8Linear) == others
    assert low.head.weight.dtype == torch.bfloat16


def test_routers_in_fp8_change_more_than_all_else():
    corpus = load_corpus(None)
    model = measured.trained(corpus, seed=3, steps=2)
    wanted = measured.choices(model, corpus)
    ways = ["bf16", "FP8 but routers, rowwise", "FP8 with routers, rowwise"]
    first = [measured.changed(wanted, measured.choices(measured.converted(model, way), corpus))[0] for way in ways]
    assert 0 < first[0] < first[1] < first[2] < 0.5
    kept = json.loads(measured.RESULT.read_text())
    shares = [measured.share(kept, way) for way in ways]
    assert shares == sorted(shares)
    assert isinstance(model.blocks[0].mixture.router, nn.Linear)
