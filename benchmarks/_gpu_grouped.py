"""Matmuls of experts alone, by PyTorch and by own kernels, and their casts: a question of `benchmarks.gpu`."""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from benchmarks._gpu_parts import Report
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.matmul import MatmulOptions
from fp8_common.torch_layers.linear.operand import quantize_operand


def grouped_matmuls(report: Report, argument: str) -> None:
    """Three matmuls of both stacks of experts, by library and own kernels in turns: "EXPERTS WIDTH HIDDEN ROWS".

    Milliseconds of both decide what `fp8_common.hardware.OWN_GROUPED` holds. The casts of their inputs by rows and by
    columns run in one launch and in two.
    """
    count, width, hidden, rows = map(int, argument.split()) if report.on_gpu else (4, 64, 32, 96)
    cuts = torch.randperm(rows, device=report.device)[: count - 1].sort().values
    groups = RowGroups(torch.cat([cuts, cuts.new_full((1,), rows)]).int(), rows)
    config, apart = LinearConfig(recipe="rowwise"), 0.0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=report.device, dtype=torch.bfloat16)

    def stack(n: int, k: int) -> Quantized:
        made = quantize_operand(random(count * n, k), config.weight)
        return Quantized(made.codes.view(count, n, k), made.scale_inv.view(count, n, 1), made.fmt)

    for n, k in ((2 * hidden, width), (width, hidden)):
        x, grad = random(rows, k), random(rows, n)
        cast = partial(groups.quantize, cast=config.input, delayed=None, record=False, both=False)
        casts = {
            "one launch": partial(cast, x, both=True),
            "two launches": lambda x=x, cast=cast: (cast(x), groups.quantize_over_rows(x, config.input)),
        }
        report.figure(f"casts of {rows} x {k}, milliseconds", report.timed(casts))
        products = {
            f"rows, {n} x {k}": (groups.matmul, cast(x), stack(n, k)),
            f"rows, {k} x {n}": (groups.matmul, cast(grad), stack(k, n)),
            f"over rows, {n} x {k}": (
                groups.matmul_over_rows,
                groups.quantize_over_rows(grad, config.grad_output),
                groups.quantize_over_rows(x, config.input),
            ),
        }
        for (name, (multiply, a, b)), fast in itertools.product(products.items(), (True, False)):
            options = MatmulOptions(torch.bfloat16, emulate=not report.on_gpu, use_fast_accum=fast)
            runs: dict[str, Callable[[], torch.Tensor]] = {
                "library": partial(multiply, a, b, options._replace(grouped="library")),
                "own": partial(multiply, a, b, options._replace(grouped="own")),
            }
            library, own = (run().float() for run in runs.values())
            apart = max(apart, float((own - library).norm() / library.norm()))
            report.claim(SAME, apart < 1e-2, f"{apart:.1e} apart")
            report.figure(f"{name}, {'fast' if fast else 'full'}, milliseconds", report.timed(runs))


SAME = "own grouped matmuls give what the library gives, but for the order of sums"
