"""Whether a compiler makes CUDA graphs of FP8 layers, without a GPU; a program that checks every recipe.

Inductor compiles a forward and a backward for `mode="reduce-overhead"` on a GPU that is pretended, up to the point
where it would record them. An obstacle is a reason why it would not: one that it gives itself, a part that stays
outside of the graph, or a write to an input that may be elsewhere in the next step. Under FSDP2 the weight is what a
gather leaves, in a module that compilers take for one of FSDP2's; nothing is gathered.

    python -m tests.helpers.cuda_graphs      prints JSON: of each case, the obstacles of forward and backward
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.modelled import models
from benchmarks.modelled.pretended_gpu import pretend_gpu
from fp8_common.torch_layers.sharding.gathered import GatheredWeight
from fp8_torch_fsdp.scales.delayed import DelayedScale

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
PLANTED = "an address that is not kept"


class Origin:
    """What FSDP2's slot says of gathered codes."""

    number, mark = 1, torch.tensor(1)


def under_fsdp(model: nn.Module) -> None:
    """Put a gathered weight into the place of the layer's."""
    for module in model.modules():
        # what fully_shard sets, and Dynamo asks for
        module._is_fsdp_managed_module, module._fsdp_use_orig_params = True, True  # pyrefly: ignore
    layer: Any = model[0]  # pyrefly: ignore[bad-index]
    shape, grid = layer.weight.shape, layer.fp8["weight"].weight.grid
    codes = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    scale_inv = torch.ones(grid.shape(shape), device="cuda")
    layer.weight = nn.Parameter(GatheredWeight(codes, scale_inv, "e4m3", torch.bfloat16, grid.tile, Origin()))


def forget_addresses(model: nn.Module) -> None:
    """Plant a fault: buffers of delayed scaling may be anywhere."""
    under_fsdp(model)
    for module in model.modules():
        for buffer in module.buffers() if isinstance(module, DelayedScale) else ():
            del buffer._dynamo_static_input_type  # pyrefly: ignore[missing-attribute]


CASES: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    **{recipe: (recipe, lambda model: None) for recipe in RECIPES},
    **{f"{recipe}, FSDP2": (recipe, under_fsdp) for recipe in RECIPES},
    PLANTED: ("tensorwise_delayed", forget_addresses),
}


def obstacles(recipe: str, change: Callable[[nn.Module], None]) -> list[list[str]]:
    """Return the obstacles of the forward and of the backward."""
    found: list[list[str]] = []
    convert = models.convert

    def converted(model: nn.Module, contender: str, mode: str) -> None:
        convert(model, contender, mode)
        with torch.no_grad():
            change(model)

    def note(*given: Any) -> None:
        """Look at a compiled graph where Inductor would record it."""
        graph = next(one for one in given if hasattr(one, "cudagraph_info"))
        own = [graph.disabled_cudagraphs_reason, *(graph.cudagraph_info.cudagraph_fail_reasons)]
        # as `torch._inductor.cudagraph_utils.check_for_mutation` asks in each call
        moves = set(graph.mutated_input_idxs) - set(graph.fx_kwargs["static_input_idxs"] or ())
        own += [f"writes to {len(moves)} inputs that may be elsewhere"] if moves else []
        outside = getattr(graph, "has_uncaptured_partition", False)  # from torch 2.14 on
        own += ["a part stays outside"] if outside or len(graph.partition_maps or ()) > 1 else []
        found.append([reason for reason in own if reason])

    with (
        mock.patch.object(models, "convert", converted),
        mock.patch("torch._C._cuda_cudaCachingAllocator_is_enabled", create=True, return_value=True),
        mock.patch("torch._inductor.output_code.cudagraph_post_compile", note),
        mock.patch("torch._inductor.output_code.cudagraph_partition_post_compile", note),
        torch._inductor.config.patch("triton.cudagraphs", True),
    ):
        models.measure(f"ours-{recipe}", "written", model="linear", width=512, tokens=256)
    return found


def main() -> int:
    """Print what was found in every case."""
    pretend_gpu()
    importlib.import_module("torch._inductor.compile_fx")
    print(json.dumps({name: obstacles(*case) for name, case in CASES.items()}, indent=1))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the pretended GPU cannot be taken down in order
