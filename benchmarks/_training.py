"""One run of `benchmarks.convergence` in training."""

import contextlib
import dataclasses
import hashlib
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._accumulation import fast_accumulation
from benchmarks._models import LAYOUTS, LENGTH, ByteModel, Published
from benchmarks._plan import (
    ALL,
    ANNEAL,
    BOTH,
    COSINE,
    E5M2_WEIGHTS,
    FAST,
    FULL,
    HELD_OUT_BATCHES,
    LAST_RATE,
    POINTS,
    RATE,
    TRUNK,
    WARM_UP,
    Spec,
)
from examples._report import Corpus
from fp8_common import E4M3
from fp8_common.torch.casts import quantize_mx
from fp8_common.torch.decoding import dequantize_mx
from fp8_common.torch_layers.sharding.gradient_messages import pack_gradients, sum_gradients
from fp8_torch_fsdp import (
    DelayedState,
    Float8TrainingConfig,
    GemmConfig,
    convert_to_float8_training,
    synchronize_scales,
)


class Training:
    """A run in training.

    Args:
        spec: What is trained.
        corpus: The text.
        device: Where.
    """

    def __init__(self, spec: Spec, corpus: Corpus, device: str = "cpu") -> None:
        self.spec, self.corpus, self.device, on_gpu = spec, corpus, device, device == "cuda"
        torch.manual_seed(spec.seed)
        self._make()
        if spec.twin and not spec.trunk:
            self._move()
        self.model.to(device)
        layers, _, self.wire = spec.recipe.partition(", ")
        if layers != "bf16":
            # padded, because some layers of the architectures have widths that GPUs do not multiply
            config = Float8TrainingConfig(recipe=layers.partition(" with ")[0], pad_inner_dim=True)
            if layers == E5M2_WEIGHTS:
                # no hardware multiplies E5M2 by E5M2
                recipe, formats = config.recipe, {"weight": "e5m2", "grad_output": "e4m3"}
                casts = {name: dataclasses.replace(getattr(recipe, name), format=to) for name, to in formats.items()}
                config = dataclasses.replace(config, recipe=dataclasses.replace(recipe, **casts))
            if layers == FULL:
                full = dict.fromkeys(("fast_accum_output", "fast_accum_grad_input", "fast_accum_grad_weight"), False)
                config = dataclasses.replace(config, gemms=GemmConfig(**full))
            convert_to_float8_training(
                self.model, config=config, module_filter_fn=self._chosen, heads=spec.head, experts=LAYOUTS
            )
        self.compressed = [
            parameter for name, parameter in self.model.named_parameters() if self.wire == ALL or "blocks" in name
        ]
        # What arrives after a gather of codes has lost the masters' last bits.
        parameters = list(self.model.parameters())
        self.masters = [parameter.detach().clone() for parameter in parameters] if self.wire else parameters
        self.rate = torch.zeros((), device=device)
        options: dict[str, Any] = {"capturable": True, "fused": True} if on_gpu else {}
        self.optimizer = torch.optim.AdamW(self.masters, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1, **options)
        # architectures ask the device where experts end
        self.replays = on_gpu and spec.model == "bytes"
        # what a graph replays, the hooks of a forward do not see
        self.synchronizes = self.replays and layers == "tensorwise_delayed"
        self.graph: torch.cuda.CUDAGraph | None = None
        rows, length = self.batch(0).shape
        self.windows = torch.zeros(rows // self.ranks, length, dtype=torch.int64, device=device)
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self.seconds = 0.0
        self.commits: list[str] = []

    @property
    def ranks(self) -> int:
        """Between how many ranks the windows of a step are split, whose gradients are added as codes."""
        return 2 if self.wire else 1

    def _make(self) -> None:
        """Make the model, the windows of each step, and those that are held out."""
        spec, corpus = self.spec, self.corpus
        self.data = hashlib.sha256(corpus.train.tobytes() + corpus.held_out.tobytes()).hexdigest()
        batches = HELD_OUT_BATCHES if spec.schedule == COSINE else 1024 // 8
        self.held_out_windows = list(corpus.held_out_batches(batches=batches, rank=0, ranks=1, rows=8, length=LENGTH))
        self.batch = lambda step: corpus.batch(seed=spec.seed, step=step, rank=0, rows=spec.rows, length=LENGTH)
        module, _, function = spec.model.partition(":")
        self.model: Any
        if function:
            task = getattr(importlib.import_module(module), function)
            self.model, self.batch, self.held_out_windows = task(spec.seed)
            windows = b"".join(np.ascontiguousarray(one).tobytes() for one in (self.batch(0), *self.held_out_windows))
            self.data = hashlib.sha256(windows).hexdigest()
        elif module in ("bytes", "mixture"):
            self.model = ByteModel(spec.dim, spec.layers, spec.outlier, mixture=module == "mixture")
            self._start()
        else:
            self.model = Published(module)

    @torch.no_grad()
    def _move(self) -> None:
        """Move the first weights by 2^-9, a bit of bfloat16: a control that differs from the others by luck alone."""
        generator = torch.Generator().manual_seed(self.spec.twin)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_((1 + 2.0**-9 * noise).to(parameter.device))

    def branch(self, path: Path) -> None:
        """Start from the checkpoint of the trunk, with its optimizer state."""
        self.load(path)
        self.losses, self.held_out, self.seconds, self.commits = [], [], 0.0, []
        if self.spec.twin:
            self._move()

    def _start(self) -> None:
        """Draw parameters: what is added to the stream, or ends in logits, starts small."""
        nn.init.normal_(self.model.embedding.weight)
        for name, weight in self.model.named_parameters():
            if "embedding" not in name:
                small = name.endswith(("out.weight", "down.weight", "head.weight", "experts.down"))
                nn.init.normal_(weight, std=(0.25 if small else 1.0) * weight.shape[-1] ** -0.5)
        if self.spec.outlier:
            for block in self.model.blocks:
                nn.init.zeros_(block.down.weight[:, 0])

    def _chosen(self, _: nn.Module, name: str) -> bool:
        spec = self.spec
        if spec.without and spec.without in name:
            return False
        return spec.head or "head" not in name

    def _accumulation(self) -> contextlib.AbstractContextManager[None]:
        """Return how emulated matmuls accumulate; on a GPU its own are used."""
        modelled = self.spec.recipe == FAST and self.device == "cpu"
        return fast_accumulation() if modelled else contextlib.nullcontext()

    def step(self) -> None:
        """Make one optimizer step."""
        spec, at = self.spec, len(self.losses)
        codes = self.batch(spec.trunk + at)
        with self._accumulation():
            loss = self._pass_of_ranks(codes) if self.wire else self._pass(codes).item()
        if spec.outlier:
            for block in self.model.blocks:
                block.down.weight.grad[:, 0] = 0
        self.rate.fill_(spec.rate * learning_rate(at, spec.steps, spec.schedule) * min(1.0, 256 / spec.dim))
        self.optimizer.step()
        self.losses.append(loss)

    def _pass_of_ranks(self, codes: np.ndarray) -> float:
        """Leave in the masters the gradients that all ranks hold after theirs were added; returns the mean loss."""
        self._gather()
        losses, gradients = [], []
        for part in np.split(codes, self.ranks):
            losses.append(self._pass(part).item())
            gradients.append([parameter.grad.clone() for parameter in self.model.parameters()])
        places = []
        for place, (parameter, master, *parts) in enumerate(
            zip(self.model.parameters(), self.masters, *gradients, strict=True)
        ):
            master.grad = sum(parts) / self.ranks
            if any(parameter is one for one in self.compressed):
                places.append(place)
        # as `compress_communication` adds them, each step with random bits of its own
        rows = torch.stack([torch.cat([parts[place].flatten() for place in places]) for parts in gradients])
        message = pack_gradients(rows, rows[:, :0], E4M3, (self.spec.seed, len(self.losses) << 32))
        total, _ = sum_gradients(message, (rows.shape[1], 0), torch.float32, E4M3, self.ranks)
        for place, part in zip(places, total.split([self.masters[i].numel() for i in places]), strict=True):
            self.masters[place].grad = part.view_as(self.masters[place])
        return sum(losses) / self.ranks

    @torch.no_grad()
    def _gather(self) -> None:
        """Bring the masters into the model, as MX codes where weights are compressed."""
        own = set(map(id, self.compressed)) if self.wire in (BOTH, ALL) else set()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            value = master
            if id(parameter) in own:
                codes, scales = quantize_mx(master.bfloat16(), E4M3, "rceil")
                value = dequantize_mx(codes, scales, E4M3, torch.bfloat16)
            parameter.copy_(value)

    def _pass(self, codes: np.ndarray) -> Tensor:
        """Make a forward and a backward; returns the loss and leaves gradients in the model's parameters."""
        self.windows.copy_(torch.from_numpy(codes.astype(np.int64)))
        if not self.replays:
            return self._forward_and_backward()
        if self.graph is None:
            delayed = DelayedState(self.model)
            before = delayed.state_dict()
            # One pass as it is, for whatever is made once; then one is captured, which runs when it is replayed.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward_and_backward()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss_of_graph = self._forward_and_backward()
            delayed.load_state_dict(before)  # the first pass is no step
        self.graph.replay()
        return self.loss_of_graph

    def _forward_and_backward(self) -> Tensor:
        if self.synchronizes:
            synchronize_scales(self.model)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = self.loss(self.windows)
        loss.backward()
        return loss.detach()

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy in nats a byte on int64 windows [rows, length + 1] of bytes."""
        # Casts of weights are not kept: a graph would read those of the pass before.
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    @property
    def is_due(self) -> bool:
        """Whether held-out windows are measured after this step."""
        steps = self.spec.steps
        points = POINTS if self.spec.schedule == COSINE else 1
        return len(self.losses) * points % steps < points

    @torch.no_grad()
    def measure(self) -> float:
        """Return the mean loss over the held-out windows."""
        if self.wire:
            self._gather()
        self.model.eval()
        windows = (torch.from_numpy(codes.astype(np.int64)) for codes in self.held_out_windows)
        with self._accumulation():
            losses = [self.loss(codes.to(self.device)) for codes in windows]
        self.model.train()
        return torch.stack(losses).mean().item()

    def save(self, path: Path) -> None:
        """Write what the next step depends on, whole or not at all."""
        measured = {name: getattr(self, name) for name in ("losses", "held_out", "seconds", "commits")}
        beside = path.with_suffix(".part")
        masters = self.masters if self.wire else []  # else they are the model's
        state = {"model": self.model.state_dict(), "masters": masters, "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"delayed": DelayedState(self.model).state_dict(), **measured}, beside)
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        saved = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(saved.pop("model"))
        for master, value in zip(self.masters, saved.pop("masters"), strict=False):
            master.copy_(value)
        self.optimizer.load_state_dict(saved.pop("optimizer"))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        DelayedState(self.model).load_state_dict(saved.pop("delayed"))
        for name, value in saved.items():
            setattr(self, name, value)


def learning_rate(step: int, steps: int, schedule: str = COSINE) -> float:
    """Return the rate of a step.

    Args:
        step: From 0.
        steps: Of the run.
        schedule: One of `benchmarks._plan`'s.
    """
    rise = RATE * min(1.0, (step + 1) / max(1, round(WARM_UP * steps)))
    if schedule == ANNEAL:
        return RATE * (1 - step / steps)
    if schedule == TRUNK:
        return rise
    end = steps if schedule == COSINE else steps * 4 / 5
    if step >= end:
        return RATE * LAST_RATE * (steps - step) / (steps - end)
    return rise * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / end)) / 2)
