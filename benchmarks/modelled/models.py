"""The models that are priced, on fake CUDA tensors, and their conversion by each contender."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import fp8_torch_fsdp as ours
from benchmarks.modelled import moe
from benchmarks.modelled.inductor import recording_compiled
from benchmarks.modelled.parts import HEAD, Norm, attention
from benchmarks.modelled.record import Step, recording

KV_HEADS = 8
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
CONTENDERS = ("bf16", "torchao-tensorwise", "torchao-rowwise", *(f"ours-{recipe}" for recipe in RECIPES))
MODES = ("compiled", "eager")


class Block(nn.Module):
    """A Llama block without biases; input and output [1, tokens, width], hidden width 7/2 of that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden, keys = width * 7 // 2, HEAD * KV_HEADS
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        sizes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        self.w = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norms = nn.ModuleList(Norm(width, eps=1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend, then transform each token; `cos` and `sin` [tokens, 64]."""
        x = x + attention(self.w, self.norms[0](x), cos, sin)
        n = self.norms[1](x)
        return x + self.w["down"](functional.silu(self.w["gate"](n)) * self.w["up"](n))


class Layer(nn.Sequential):
    """One linear layer [width -> 7/2 width]."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width * 7 // 2, bias=False))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Multiply; there is nothing to rotate."""
        return self[0](x)


MODELS = {"block": Block, "linear": Layer, "moe": moe.MoeBlock, "experts": moe.ExpertsAlone}
EXPERTS = {
    name: partial(moe.ExpertsAlone, hidden=shape.hidden, count=shape.count) for name, shape in moe.MIXTURES.items()
}


def contenders(model: str) -> tuple[str, ...]:
    """Return who computes a model."""
    experts = ("bf16", "torchao-rowwise", *(f"ours-{recipe}" for recipe in moe.RECIPES))
    return experts if model in ("moe", "experts") else CONTENDERS


def convert(model: nn.Module, contender: str, mode: str) -> None:
    """Convert the linear layers in place; no weight is gathered."""
    family, _, recipe = contender.partition("-")
    if family == "torchao":
        import torchao.float8 as torchao

        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "router" not in name)
        moe.use_torchao(model)
    elif family == "ours":
        # Compilers copy what they guard: the state of weights that can be gathered in FP8, and copies of its buffers
        # cannot be made on a GPU that is not there.
        gather = mode == "eager"
        # scales that are there before the operands are, as delayed scaling finds them from the third step on
        delayed = ours.DelayedScalingConfig(initial="one") if "delayed" in recipe else None
        config = ours.Float8TrainingConfig(recipe=recipe, all_gather=gather, delayed=delayed)
        ours.convert_to_float8_training(model, config=config, experts=moe.LAYOUTS)
    elif contender != "bf16":
        raise ValueError(f"{contender!r} is none of the contenders.")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure(contender: str, mode: str, *, model: str, width: int, tokens: int) -> Step:
    """Return what a forward and a backward in bfloat16 do; needs `pretend_gpu`.

    Args:
        contender: One of `CONTENDERS`, or "ours-" and any recipe.
        mode: "compiled" or "eager", or "written": compiled, of which only the code is recorded.
        model: One of `MODELS` or `EXPERTS`.
        width: Features, a multiple of 128.
        tokens: Rows.
    """
    torch._dynamo.reset()
    step = Step()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        with torch.device("cuda"), _default_dtype(torch.bfloat16):
            network = (MODELS | EXPERTS)[model](width)
            x = torch.randn(1, tokens, width, requires_grad=True)
            cos, sin = (torch.randn(tokens, HEAD // 2, dtype=torch.float32) for _ in range(2))
        convert(network, contender, mode)
        # not __call__: what hooks of the root do once per step is not part of a block
        forward = network.forward
        if mode != "eager":
            forward = torch.compile(forward, fullgraph=True)
        with recording(step) if mode == "eager" else recording_compiled(step, priced=mode == "compiled"):
            y = forward(x, cos, sin)
            y.backward(torch.empty_like(y))
    return step
