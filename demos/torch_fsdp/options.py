"""The demo's options: what it can be asked for, what it refuses, what the training processes are told."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

from demos import torch_fsdp as demo
from demos.common.command import Parser, positive
from demos.common.machine import usable_cores
from fp8_common import Fp8Error

STEPS, SEEDS, RANKS, DIM, LAYERS = 80, 2, 2, 256, 3
QUICK_STEPS = 30
# The width of an attention head. FP8 products want multiples of 16, and a head of 32 keeps small models possible.
HEAD_DIM = 32
# More processes than this only wait for each other.
RANKS_PER_CORE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """One call of the demo; two calls with equal options and equal data train the same models.

    Attributes:
        steps: optimizer steps of each run.
        seeds: how many times both runs are made, with seeds 0, 1, ...
        ranks: processes that share the model.
        recipe: name of the FP8 recipe.
        gradients: how the FP8 run reduces gradients: "float32", or "fp8" as codes.
        data: file or folder to train on; None is the standard library's source.
        device: where to train; never "auto" here.
        dim: width of the model.
        layers: number of blocks.
        out: folder of the report.
        checkpoint: folder of the checkpoints, or None for none.
        checkpoint_every: steps between two checkpoints.
        resume: continue from the newest checkpoint.
    """

    steps: int
    seeds: int
    ranks: int
    recipe: str
    data: str | None
    device: Literal["cpu", "cuda"]
    dim: int
    layers: int
    out: Path
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    gradients: Literal["float32", "fp8"] = "float32"

    def to_json(self) -> str:
        """Return the options as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        fields |= {name: Path(fields[name]) for name in ("out", "checkpoint") if fields[name]}
        return cls(**fields)

    def identity(self, digest: str) -> dict[str, str | int | None]:
        """Return what has to be equal for a run to go on bit for bit: everything that the losses depend on.

        Args:
            digest: of the data.
        """
        names = ("steps", "ranks", "recipe", "gradients", "device", "dim", "layers")
        return {**{name: getattr(self, name) for name in names}, "data": digest, "torch": torch.__version__}


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line.

    Raises:
        Fp8Error: an option asks for what cannot be done here.
        SystemExit: the command line cannot be read (exit code 2), or asks for help.
    """
    parser = _parser()
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    usual = {"steps": QUICK_STEPS, "seeds": 1} if given.pop("quick") else {"steps": STEPS, "seeds": SEEDS}
    given |= {name: given[name] or value for name, value in usual.items()}
    if given["dim"] % HEAD_DIM:
        raise Fp8Error(f"--dim must be a multiple of {HEAD_DIM} (the width of a head), not {given['dim']}.")
    if given["resume"] and not given["checkpoint"]:
        raise Fp8Error("--resume needs --checkpoint DIR, the folder that the interrupted run was given.")
    _check_recipe(given["recipe"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given["device"] = _device(given["device"], gpus)
    given["ranks"] = _ranks(given["ranks"], given["device"], gpus)
    return Options(**given)


def _parser() -> Parser:
    parser = Parser(prog="python -m demos.torch_fsdp", description=demo.__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps: bytes and times, nothing about the loss")
    add("--steps", type=positive, help=f"optimizer steps of each run (default {STEPS})")
    add("--seeds", type=positive, help=f"train with this many seeds and compare the means (default {SEEDS})")
    add("--ranks", type=positive, help=f"processes (default {RANKS}, or the number of GPUs if that is less)")
    add("--recipe", default="tensorwise", help="FP8 recipe (default %(default)s)")
    add(
        "--gradients",
        choices=["float32", "fp8"],
        default="float32",
        help="how the FP8 run reduces gradients (default %(default)s)",
    )
    add("--data", metavar="PATH", help="file or folder to train on (default: Python's standard library)")
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to train (default: a GPU if any)",
    )
    add("--dim", type=positive, default=DIM, help="width of the model (default %(default)s)")
    add("--layers", type=positive, default=LAYERS, help="number of blocks (default %(default)s)")
    add("--out", type=Path, default=Path("demo-report"), help="folder of the report (default %(default)s)")
    add("--checkpoint", type=Path, metavar="DIR", help="save checkpoints here while training")
    add(
        "--checkpoint-every",
        type=positive,
        default=25,
        metavar="N",
        help="steps between them (default %(default)s)",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    return parser


def _check_recipe(recipe: str) -> None:
    from fp8_torch_fsdp import Float8LinearConfig

    Float8LinearConfig.from_recipe_name(recipe)


def _device(asked: str, gpus: int) -> Literal["cpu", "cuda"]:
    if asked == "cuda" and not gpus:
        raise Fp8Error("--device cuda needs a GPU that PyTorch can use, and there is none here; use --device cpu.")
    return "cuda" if gpus and asked != "cpu" else "cpu"


def _ranks(asked: int | None, device: str, gpus: int) -> int:
    most = gpus if device == "cuda" else RANKS_PER_CORE * usable_cores()
    if asked is not None and asked > most:
        what = f"{gpus} GPU{'s' * (gpus > 1)}" if device == "cuda" else f"{usable_cores()} cores"
        raise Fp8Error(f"--ranks {asked} is more than {what} can serve; ask for at most {most}.")
    return asked or min(RANKS, most)
