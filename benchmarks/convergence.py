"""Training runs that answer: do models learn the same in FP8, and where does each recipe break?

    python -m benchmarks.convergence --state FOLDER [--results FOLDER] [--minutes M] [PART OF A NAME ...]
    python -m benchmarks.convergence --list

One process on one thread makes the runs of `queue()`, the most useful first. Stopped or killed, the same command goes
on bit for bit from the newest checkpoint in FOLDER. A finished run is one JSON file in benchmarks/results/convergence;
`benchmarks.convergence_table` makes table and pictures of them.

A run trains the layers of `convert_to_float8_training` under FSDP2 on one rank, on the source of Python's standard
library. What is gathered in FP8 are the codes that the product would cast anyway, so more ranks compute the same
numbers. All recipes share parameters, windows, learning rates and held-out windows of their seed. Products are
emulated: the operands of a GPU's FP8 products, accumulated in float32. Those of bfloat16 matrices are computed in
float32 too and rounded once (`Bfloat16Matmuls`).
"""

import argparse
import fcntl
import hashlib
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from examples._report import Corpus, load_corpus
from fp8_common._reference.gradients import round_gradients, sum_rounded
from fp8_torch_fsdp import DelayedState, convert_to_float8_training

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/convergence"
RECIPES = ("bf16", "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
FP8_GRADIENTS = "fp8_gradients"
"""bf16 matmuls; gradients of the blocks' layers are summed as two ranks would exchange them in FP8."""
ARCHITECTURES = ("Mamba2", "Gemma4", "Olmoe")
TINY: dict[str, Any] = {"dim": 128, "layers": 2, "rows": 4, "steps": 400}
"""The model and budget of the runs that look for where recipes break."""
LENGTH, HEAD_DIM, HELD_OUT_BATCHES, POINTS = 128, 32, 16, 20
RATE, WARM_UP, LAST_RATE = 1.5e-3, 0.05, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One run. Runs with equal fields but `recipe` are compared with one another.

    Attributes:
        question: What the run helps to answer; the first part of its name.
        recipe: Of `RECIPES`, or `FP8_GRADIENTS`.
        seed: Of parameters and windows.
        model: "bytes", or one of `ARCHITECTURES`.
        dim: Width of "bytes".
        layers: Blocks of "bytes".
        rows: Windows of 128 bytes in a step.
        steps: Optimizer steps.
        rate: Factor on every learning rate.
        outlier: k: the first channel that enters each `down` layer is 2^k. 0 leaves the model as it is.
        head: Whether the vocabulary head is converted too.
        without: Layers whose name contains this stay in bf16; "" leaves none out.
    """

    question: str
    recipe: str
    seed: int
    model: str = "bytes"
    dim: int = 256
    layers: int = 3
    rows: int = 8
    steps: int = 4000
    rate: float = 1
    outlier: int = 0
    head: bool = False
    without: str = ""

    @property
    def name(self) -> str:
        """The name of the run's files: question, recipe, seed, and what differs from the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        changed = [f"{name}={value}" for name, value in asdict(self).items() if value != usual[name]][3:]
        return "-".join([self.question, self.recipe, f"seed={self.seed}", *changed])


def queue() -> Iterator[Spec]:
    """Yield every run, the most useful first: whole comparisons of one seed before the next seed."""
    yield from breaks(0)  # cheap: all of them cost less than three of the long runs
    for seed in range(5):
        # a recipe with MX scales belongs here too, as soon as the package has one
        yield from (Spec(question="recipes", recipe=recipe, seed=seed) for recipe in (*RECIPES, FP8_GRADIENTS))
        if seed < 3:
            yield from architectures(seed)
        if 0 < seed < 3:
            yield from breaks(seed)
    for seed, recipe in itertools.product(range(2), ("bf16", "tensorwise", "rowwise", "blockwise")):
        yield Spec(question="larger", recipe=recipe, seed=seed, dim=512, layers=6, steps=3000)


def breaks(seed: int) -> Iterator[Spec]:
    """Yield runs of a small model, perturbed one way at a time, all recipes of a perturbation after one another."""
    if seed == 0:
        # the rates among which that of all runs was chosen
        yield from (Spec(question="breaks", recipe="bf16", seed=0, **TINY, rate=rate) for rate in (1, 0.5, 2, 4, 8))
    changes: list[dict[str, Any]] = [{}, {"outlier": 16}, {"rate": 8}, {"head": True}, {"outlier": 12}, {"rate": 4}]
    changes += [{"outlier": 20}, {"rate": 2}, {"outlier": 8}, {"layers": 8}, {"layers": 16}]
    for change in changes:
        for recipe in RECIPES:
            changed: dict[str, Any] = TINY | change
            yield Spec(question="breaks", recipe=recipe, seed=seed, **changed)


def architectures(seed: int) -> Iterator[Spec]:
    """Yield runs of architectures of Transformers; of Mamba-2 also with one of its two projections left in bf16."""
    for model in ARCHITECTURES:
        for recipe in RECIPES:
            yield Spec(question="architectures", recipe=recipe, seed=seed, model=model, rows=4, steps=200)
    for without in ("in_proj", "out_proj"):
        yield Spec(
            question="architectures", recipe="tensorwise", seed=seed, model="Mamba2", rows=4, steps=200, without=without
        )


# ---------------------------------------------------------------- models


class Block(nn.Module):
    """Attention and a SwiGLU, each on a normalized input and added to its input.

    Args:
        dim: Width, a multiple of 128.
        outlier: See `Spec`.
    """

    def __init__(self, dim: int, outlier: int) -> None:
        super().__init__()
        hidden = 11 * dim // 4
        self.heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.outlier = outlier

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the block's output for x [rows, length, dim]; `bias` is added to scores [rows * heads, ...]."""
        x = x + self.out(self.attend(self.qkv(_norm(x)), bias))
        y = _norm(x)
        hidden = F.silu(self.gate(y)) * self.up(y)
        if self.outlier:
            # Its weights are and stay 0 (`Training.step`): in bf16 this changes nothing, in FP8 only scales.
            hidden = torch.cat([torch.full_like(hidden[..., :1], 2.0**self.outlier), hidden[..., 1:]], dim=-1)
        return x + self.down(hidden)

    def attend(self, qkv: Tensor, bias: Tensor) -> Tensor:
        """Return what each position reads; written out, because the fused backward is slow in bf16 on CPUs."""
        rows, length, _ = qkv.shape
        heads = qkv.view(rows, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = heads.reshape(3, rows * self.heads, length, HEAD_DIM).unbind()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=HEAD_DIM**-0.5)
        read = torch.bmm(torch.softmax(scores, dim=-1), v)
        return read.view(rows, self.heads, length, HEAD_DIM).transpose(1, 2).reshape(rows, length, -1)


class ByteModel(nn.Module):
    """A decoder over bytes: ALiBi's distances as positions, norms without weights, layers without biases."""

    bias: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, spec.dim)
        self.blocks = nn.ModuleList(Block(spec.dim, spec.outlier) for _ in range(spec.layers))
        self.head = nn.Linear(spec.dim, 256, bias=False)
        position, heads = torch.arange(LENGTH), spec.dim // HEAD_DIM
        distance, slopes = position[:, None] - position, 2.0 ** -(torch.arange(heads) % 8 + 1.0)
        bias = torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits [rows, length, 256] of the next byte for integer codes [rows, length]."""
        x = self.embedding(codes)
        bias = self.bias.to(x.dtype).repeat(len(codes), 1, 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(_norm(x))


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Published(nn.Module):
    """A small model of an architecture of Transformers, its layers and forward those of the published ones."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers

        decoder = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        sizes: dict[str, dict[str, Any]] = {
            "Mamba2": {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 32,
                       "state_size": 32, "n_groups": 1, "chunk_size": 32},
            "Gemma4": decoder | heads | {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 32,
                       "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0},
            "Olmoe": decoder | heads | {"num_experts": 4, "num_experts_per_tok": 2},
        }  # fmt: skip
        prefix = {"Gemma4": "Gemma4Text"}.get(name, name)
        config = getattr(transformers, f"{prefix}Config")(**(sizes[name] | special))
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)
        self.blocks = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits [rows, length, 256]."""
        return self.model(input_ids=codes, use_cache=False).logits


class Bfloat16Matmuls(TorchDispatchMode):
    """Computes matmuls of bfloat16 CPU matrices as float32 matmuls of the same numbers, rounded once to bfloat16.

    Processors without bfloat16 units take five to ten times as long for the bfloat16 ones.
    """

    matmuls = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func.overloadpacket not in self.matmuls or args[-1].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        return func(*(arg.float() for arg in args), **kwargs).bfloat16()


# ---------------------------------------------------------------- one run


class Training:
    """A run in training.

    Args:
        spec: What is trained.
        corpus: The text.
    """

    def __init__(self, spec: Spec, corpus: Corpus) -> None:
        self.spec, self.corpus = spec, corpus
        torch.manual_seed(spec.seed)
        self.model: Any = ByteModel(spec) if spec.model == "bytes" else Published(spec.model)
        if spec.model == "bytes":
            self._start()
        if spec.recipe not in ("bf16", FP8_GRADIENTS):
            convert_to_float8_training(self.model, recipe=spec.recipe, module_filter_fn=self._chosen)
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self.seconds = 0.0
        self.commits: list[str] = []

    def _start(self) -> None:
        """Draw parameters: what is added to the stream, or ends in logits, starts small."""
        nn.init.normal_(self.model.embedding.weight)
        for name, weight in self.model.named_parameters():
            if "embedding" not in name:
                small = name.endswith(("out.weight", "down.weight", "head.weight"))
                nn.init.normal_(weight, std=(0.25 if small else 1.0) * weight.shape[1] ** -0.5)
        if self.spec.outlier:
            for block in self.model.blocks:
                nn.init.zeros_(block.down.weight[:, 0])

    def _chosen(self, _: nn.Module, name: str) -> bool:
        spec = self.spec
        if spec.without and spec.without in name:
            return False
        return spec.head or "head" not in name

    def step(self) -> None:
        """Make one optimizer step."""
        spec, at = self.spec, len(self.losses)
        codes = self.corpus.batch(seed=spec.seed, step=at, rank=0, rows=spec.rows, length=LENGTH)
        if spec.recipe == FP8_GRADIENTS:
            loss = self._gradients_of_two(codes)
        else:
            loss = self.loss(codes)
            loss.backward()
        if spec.outlier:
            for block in self.model.blocks:
                block.down.weight.grad.to_local()[:, 0] = 0
        for group in self.optimizer.param_groups:
            group["lr"] = spec.rate * learning_rate(at, spec.steps) * min(1.0, 256 / spec.dim)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def loss(self, codes: np.ndarray) -> Tensor:
        """Return the mean cross entropy in nats a byte on windows of uint8 bytes [rows, length + 1]."""
        windows = torch.from_numpy(codes.astype(np.int64))
        logits = self.model(windows[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def _gradients_of_two(self, codes: np.ndarray) -> Tensor:
        """Leave in `grad` what two ranks with half of the windows each would hold; returns the mean loss."""
        losses, halves = [], []
        for half in np.split(codes, 2):
            loss = self.loss(half)
            loss.backward()
            halves.append([p.grad.to_local().clone() for p in self.model.parameters()])
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        for parameter, *parts in zip(self.model.parameters(), *halves, strict=True):
            local = parameter.to_local()
            if any(parameter is own for own in self.model.blocks.parameters()):
                rows = np.stack([part.numpy().ravel() for part in parts])
                mean = torch.from_numpy(sum_rounded(*round_gradients(rows, "e4m3"), "e4m3", 2)).view_as(local)
            else:
                mean = (parts[0] + parts[1]) / 2
            parameter.grad = type(parameter.data).from_local(mean, parameter.device_mesh, parameter.placements)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean loss over the held-out windows."""
        self.model.eval()
        batches = self.corpus.held_out_batches(batches=HELD_OUT_BATCHES, rank=0, ranks=1, rows=8, length=LENGTH)
        value = torch.stack([self.loss(codes) for codes in batches]).mean().item()
        self.model.train()
        return value

    def save(self, path: Path) -> None:
        """Write what the next step depends on, whole or not at all."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        measured = {name: getattr(self, name) for name in ("losses", "held_out", "seconds", "commits")}
        beside = path.with_suffix(".part")
        delayed = DelayedState(self.model).state_dict()
        torch.save({"model": model, "optimizer": optimizer, "delayed": delayed, **measured}, beside)
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        saved = torch.load(path, weights_only=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved.pop("model"),
            optim_state_dict=saved.pop("optimizer"),
            options=StateDictOptions(full_state_dict=True),
        )
        DelayedState(self.model).load_state_dict(saved.pop("delayed"))
        for name, value in saved.items():
            setattr(self, name, value)


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: a short linear rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    return RATE * rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


# ---------------------------------------------------------------- the queue


def finish(spec: Spec, corpus: Corpus, state: Path, results: Path, end: float, every: float) -> bool:
    """Train until the run has ended, whose result is then written, or the time is up; returns whether it has ended.

    Args:
        spec: The run.
        corpus: What it reads.
        state: The folder of checkpoints.
        results: The folder of results.
        end: `time.monotonic()` at which to stop behind a checkpoint.
        every: Seconds between checkpoints.
    """
    saved, result = state / f"{spec.name}.pt", results / f"{spec.name}.json"
    run, commit = Training(spec, corpus), current_commit()
    if saved.exists():
        run.load(saved)
    if commit not in run.commits:
        run.commits.append(commit)
    print(f"{spec.name}: from step {len(run.losses)} of {spec.steps}", flush=True)
    clock, written = time.process_time(), time.monotonic()
    while len(run.losses) < spec.steps and (not run.losses or math.isfinite(run.losses[-1])):
        run.step()
        if (done := len(run.losses)) * POINTS % spec.steps < POINTS:
            run.held_out.append(run.measure())
        run.seconds, clock = run.seconds + time.process_time() - clock, time.process_time()
        if (now := time.monotonic()) - written >= every or now > end:
            run.save(saved)
            print(f"{spec.name}: step {done}, loss {run.losses[-1]:.4f}, {run.seconds:.0f} s", flush=True)
            written = time.monotonic()
            if now > end:
                return False
    beside = result.with_suffix(".part")
    beside.write_text(json.dumps(outcome(run)) + "\n")
    beside.replace(result)
    saved.unlink(missing_ok=True)
    print(f"{spec.name}: finished after {run.seconds:.0f} s", flush=True)
    return True


def outcome(run: Training) -> dict[str, Any]:
    """Return what is recorded of a run that has ended."""
    diverged = not all(map(math.isfinite, (run.losses[-1], *run.held_out)))
    return {
        "spec": asdict(run.spec),
        # JSON knows no NaN
        "held_out": [value if math.isfinite(value) else None for value in run.held_out],
        "diverged_at": len(run.losses) if diverged else None,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "commits": run.commits,
        "torch": torch.__version__,
        "data": hashlib.sha256(run.corpus.train.tobytes() + run.corpus.held_out.tobytes()).hexdigest(),
        "cpu_seconds": round(run.seconds, 1),
    }


def current_commit() -> str:
    """Return the commit of this checkout, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Make the runs that the command line asks for; returns 1 if some failed or are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only runs whose name contains one of these")
    parser.add_argument("--state", type=Path, help="where checkpoints are, outside of the repository")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop behind a checkpoint after this time")
    parser.add_argument("--checkpoint-seconds", type=float, default=150, help="between checkpoints (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the queue, with a mark at what is finished")
    parser.add_argument("--spec", action="append", help="make this run, a JSON object, instead of the queue's")
    options = parser.parse_args()
    runs = [Spec(**json.loads(one)) for one in options.spec or ()] or list(dict.fromkeys(queue()))
    runs = [spec for spec in runs if not options.parts or any(part in spec.name for part in options.parts)]
    missing = [spec for spec in runs if not (options.results / f"{spec.name}.json").exists()]
    if options.list:
        print("\n".join(f"{'x ' if spec not in missing else '  '}{spec.name}" for spec in runs))
        return 0
    if options.state is None or options.state.resolve().is_relative_to(ROOT):
        parser.error("--state must be a folder outside of the repository: checkpoints are large")
    for folder in (options.state, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    with (options.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another process makes the runs of {options.state}; wait for it or give another folder")
        return make(missing, options)


def make(missing: list[Spec], options: argparse.Namespace) -> int:
    """Make runs one after the other; one that fails is told, and the others go on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    corpus, end, failed = load_corpus(), time.monotonic() + 60 * options.minutes, 0
    with Bfloat16Matmuls():
        for spec in missing:
            try:
                if not finish(spec, corpus, options.state, options.results, end, options.checkpoint_seconds):
                    return 1
            except Exception:
                traceback.print_exc()
                print(f"{spec.name}: failed", flush=True)
                failed += 1
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
