"""Programs that `fsdp_programs` runs, and how Hypothesis draws them."""

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st

import fp8_torch_fsdp as f8
from fp8_common import CANONICAL, POWER_OF_2
from fsdp_models import RECIPES, STATIC, with_delayed
from fsdp_writes import EDITS, READERS

WIDTHS = ((24, 40, 7, 24), (24, 2, 40, 24), (24, 136, 24))

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}
NAMED: dict[Any, tuple[Any, dict[str, Any]]] = {
    "static": (STATIC, {}),
    "delayed_from_one": (
        "tensorwise_delayed",
        {"delayed": with_delayed(scale_fn="most_recent", margin=1, initial="one")},
    ),
}
"""Recipes beside those of `RECIPES`, with options of the conversion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is done, in which setting.

    Attributes:
        ranks: Number of ranks of FSDP2; 0 for one process without it.
        operations: Name of a method of `Run` or `Pair` and its arguments, each.
        copies: Whether every rank keeps a copy (HSDP) instead of a shard.
        reentrant: How the forward of the model recomputes its layers, if it does.
        wrapper: Whether torch's `checkpoint_wrapper` is "inside" or "outside" of each layer's `fully_shard`.
    """

    ranks: int
    operations: tuple[tuple[Any, ...], ...]
    recipe: Any = "tensorwise"
    dtype: torch.dtype = torch.float32
    widths: tuple[int, ...] = WIDTHS[0]
    reshard: bool | None = None
    copies: bool = False
    optimizer: str = "sgd"
    reentrant: bool | None = None
    wrapper: str | None = None
    pad: bool = False


RANK, LAYER, FACTOR = st.sampled_from((None, 0, 1)), st.integers(0, 2), st.sampled_from((0.5, 0.75, 1.5, 8.0, 1e-3))
USUAL = {"train": (st.integers(1, 3), st.booleans()), "step": (RANK,)}
MODES = st.sampled_from(("eval", "no_grad", "inference"))
SWAPS = ("mul_", "copy_", "lerp_", ".data")
RARE: dict[str, tuple[st.SearchStrategy, ...]] = {
    "forward": (),
    "backward": (),
    "backward_of_the_first": (),
    "method": (),
    "evaluate_between": (MODES,),
    "teach": (st.sampled_from(SWAPS), MODES),
    "keep_gathered": (st.booleans(),),
    "evaluate": (MODES,),
    "read": (st.sampled_from(tuple(READERS)), RANK),
    "keep": (RANK,),
    "load": (st.sampled_from(("copy", "assign")), FACTOR),
    "edit": (st.sampled_from(tuple(EDITS)), FACTOR),
    "edit_on_one_rank": (st.integers(0, 1), FACTOR),
    "clone": (),
    "average": (),
    "swap": (),
    "snapshot": (),
    "restore": (),
    "reshard": (),
    "unshard": (),
    "fail_in_forward": (LAYER,),
    "fail_in_backward": (LAYER, st.booleans()),
    "fail_in_step": (),
    "synchronize": (st.sampled_from(("precompute", "history")),),
    "freeze": (LAYER,),
    "clip": (),
}
ENDING = (("train", 1, False), ("step", None), ("train", 1, False))
"""How every drawn program ends, so that nothing that it did stays unseen."""


def operations() -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw what a program does, half of it training."""
    usual, rare = (
        st.one_of(*(st.tuples(st.just(name), *arguments) for name, arguments in table.items()))
        for table in (USUAL, RARE)
    )
    drawn = st.lists(st.booleans().flatmap(lambda often: usual if often else rare), min_size=4, max_size=16)
    return drawn.map(lambda found: (*found, *ENDING))


@st.composite
def casts(draw: Any, formats: tuple[str, ...], granularities: tuple[str, ...]) -> f8.CastRecipe:
    """Draw the cast of one operand."""
    granularity = draw(st.sampled_from(granularities))
    scalings = ("dynamic", "static", "delayed") if granularity == "tensorwise" else ("dynamic",)
    scaling = draw(st.sampled_from(scalings))
    policy = draw(st.sampled_from((CANONICAL, POWER_OF_2)))
    if scaling == "delayed":
        algo = draw(st.sampled_from(("max", "most_recent")))
        policy = dataclasses.replace(policy, history=draw(st.integers(1, 4)), algo=algo)
    return f8.CastRecipe(
        format=draw(st.sampled_from(formats)),
        scaling=scaling,
        granularity=granularity,
        policy=policy,
        static_scale=draw(st.sampled_from((0.5, 24.0, 256.0))) if scaling == "static" else None,
    )


@st.composite
def recipes(draw: Any) -> f8.Recipe:
    """Draw any recipe that has products: one family of granularities, E5M2 in one operand at most."""
    e4m3, e5m2 = draw(st.sampled_from((("e4m3", "e5m2"), ("e4m3fnuz", "e5m2fnuz"))))
    wide = draw(st.sampled_from(("grad_output", "input", "weight", None)))
    blockwise = draw(st.integers(0, 3)) == 0
    vectors, rows = ("tensorwise", "rowwise"), ("blockwise_1x128",)
    operands = {}
    for name in ("weight", "input", "grad_output"):
        of_blocks = ("blockwise_128x128",) if name == "weight" else rows
        operands[name] = draw(casts((e5m2 if wide == name else e4m3,), of_blocks if blockwise else vectors))
    if operands["weight"].granularity != "tensorwise" and operands["grad_output"].scaling == "delayed":
        operands["grad_output"] = f8.CastRecipe(format=operands["grad_output"].format)
    if draw(st.integers(0, 3)) == 0:
        off = f8.CastRecipe(scaling="disabled")
        operands.update(input_for_grad_weight=off, grad_output_for_grad_weight=off)
    return f8.Recipe(name="drawn", **operands)


SIZES = st.one_of(st.integers(1, 9), st.integers(10, 48), st.sampled_from((127, 128, 129, 200, 257)))
PROGRAMS = st.builds(
    Program,
    ranks=st.sampled_from((2, 0, 1, 2, 3)),
    operations=operations(),
    recipe=st.sampled_from((*RECIPES, *NAMED)) | recipes(),
    dtype=st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
    widths=st.sampled_from(WIDTHS) | st.lists(SIZES, min_size=2, max_size=4).map(tuple),
    pad=st.booleans(),
    reshard=st.sampled_from((None, True, False)),
    copies=st.sampled_from((False, False, False, True)),
    optimizer=st.sampled_from(tuple(OPTIMIZERS)),
    reentrant=st.sampled_from((None, None, True, False)),
    wrapper=st.sampled_from((None, None, "inside", "outside")),
)
