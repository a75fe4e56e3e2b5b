"""The pictures of README and pages, each a function of axes; `benchmarks.figures` draws them.

Every curve of the numerics is computed by `fp8_common` on NumPy arrays from fixed seeds; losses and links come from
`benchmarks/results`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fp8_common as fp8
from benchmarks._common import RESULTS, median_ratio
from benchmarks._plan import RECIPES
from benchmarks._runs import BAR, Row, compare, is_broken

FORMATS = {"E4M3": fp8.E4M3, "E5M2": fp8.E5M2, "E4M3 FNUZ": fp8.formats.E4M3FNUZ, "E5M2 FNUZ": fp8.formats.E5M2FNUZ}
PACKAGES = ("fp8-torch-fsdp", "fp8-jax-owg", "fp8-te-init")
COLOURS = dict(zip(FORMATS, ("#1f6feb", "#d1570c", "#1a7f37", "#8250df"), strict=True))


def picture(name: str, size: tuple[float, float], draw: Callable[[Axes], None], folder: Path) -> None:
    """Write a picture for light and dark pages: what is written is gray, and the ground is theirs."""
    gray = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), "gray")
    plain = {"svg.hashsalt": "fp8", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with mpl.rc_context(plain | gray):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, transparent=True)


# ---------------------------------------------------------------- results


def of_results(name: str) -> Any:
    """Return what a committed file holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def by_package() -> dict[str, dict[str, dict[int, float]]]:
    """Return the held-out losses of the runs of all packages, by package, recipe and seed; the control comes first."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, run in of_results("convergence")["runs"].items():
        package, recipe, seed = name.split("/")
        found.setdefault(package, {}).setdefault(recipe, {})[int(seed)] = run["val_loss"]
    return dict(sorted(found.items(), key=lambda one: PACKAGES.index(one[0].partition(",")[0])))


def above_control(recipes: Mapping[str, dict[int, float]], recipe: str) -> list[float]:
    """Return how many per cent each seed of a recipe ends above the control, which is the first of `recipes`."""
    control = recipes[next(iter(recipes))]
    return [100 * (loss / control[seed] - 1) for seed, loss in sorted(recipes[recipe].items()) if seed in control]


def draw_dots(axes: Axes, rows: Mapping[str, list[float]]) -> None:
    """Draw a row of dots for each name, one a seed, and under it the mean with its standard error."""
    for place, values in enumerate(rows.values()):
        axes.plot(values, np.full(len(values), place), "o", color=COLOURS["E4M3"], alpha=0.5, markersize=5)
        error = stdev(values) / len(values) ** 0.5
        axes.errorbar(fmean(values), place + 0.25, xerr=error, fmt="d", color=COLOURS["E5M2"], capsize=4)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)


def draw_losses(axes: Axes) -> None:
    """Draw the held-out loss of each seed with bf16 and with FP8."""
    runs = of_results("gradient_convergence")["runs"]
    draw_dots(axes, {"bf16": runs["bf16"]["held_out"], "FP8": runs["fp8"]["held_out"]})
    axes.set_xlabel("held-out loss after 600 steps, nats a byte: a dot a seed, mean and standard error")


def draw_differences(axes: Axes) -> None:
    """Draw how far each recipe ends from its control."""
    rows = {
        f"{package}, {recipe}": above_control(recipes, recipe)
        for package, recipes in by_package().items()
        for recipe in list(recipes)[1:]
    }
    draw_dots(axes, dict(sorted(rows.items())))
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_xlabel("held-out loss above the control, %")


def draw_links(axes: Axes) -> None:
    """Draw how many times as fast as on bf16 communication steps are, over what each rank can send."""
    rows = of_results("links")["rows"]
    for ranks, line in ((2, "o-"), (4, "s--")):
        own = [row for row in rows if row["ranks"] == ranks and row["rate"]]  # 0: no limit
        for name, colour in zip(("gathers FP8", "both FP8", "both FP8, nearest"), COLOURS.values(), strict=False):
            ratios = [median_ratio(row["seconds"]["bf16"], row["seconds"][name]) for row in own]
            axes.plot([row["rate"] for row in own], ratios, line, color=colour, label=f"{name}, {ranks} ranks")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="Mbit/s that each rank can send", ylabel="times as fast as bf16")
    axes.set_xticks(ticks := sorted({row["rate"] for row in rows if row["rate"]}), map(str, ticks))
    axes.minorticks_off()
    axes.legend(fontsize=8)


def draw_intervals(axes: Axes, shown: list[tuple[str, Any, Any]]) -> None:
    """Draw a dot for each recipe of each comparison, its own interval, and thin the one that holds for all at once."""
    names, place = {}, 0
    for title, recipes, _ in shown:
        rows = {name: row for name, row in compare(recipes).items() if row.limits}
        if rows:
            axes.annotate(title, (0, place), ha="center", va="center", fontsize=7, color="#d1570c")
            place += 1
        for name, row in rows.items():
            for half, width in ((row.estimate.half(row.comparisons), 0.8), (row.estimate.half(), 2.5)):
                axes.plot([row.estimate.mean - half, row.estimate.mean + half], [place, place], "-", color="#1f6feb",
                          linewidth=width)  # fmt: skip
            axes.plot(row.estimate.mean, place, "o", color="#1f6feb", markersize=4)
            names[place] = name
            place += 1
    for bar in (-BAR, BAR):
        axes.axvline(bar, color="#d1570c", linestyle="--", linewidth=1)
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(list(names), list(names.values()), fontsize=7)
    axes.set_xscale("symlog", linthresh=BAR)
    axes.set_xticks(ticks := [-3, -1, -BAR, 0, BAR, 1, 3], [f"{tick:g}" for tick in ticks])
    axes.set(xlabel="held-out loss above bf16, %; logarithmic beyond the bar", ylim=(place - 0.5, -0.8))


def draw_breaks(axes: Axes, rows: dict[str, dict[str, Row]]) -> None:
    """Draw recipes against perturbations: how far above bf16; filled where training suffers."""
    rows = {words: found for words, found in rows.items() if found}
    for y, found in enumerate(rows.values()):
        for x, row in enumerate(map(found.get, RECIPES[1:])):
            if row:
                broken = is_broken(row)
                colour = "#d1570c" if broken else "#1f6feb"
                axes.plot(x, y, "o", color=colour, markersize=7, fillstyle="full" if broken else "none")
                text = f"{row.estimate.mean:+.2f}" if row.estimate else "diverged"
                axes.annotate(text, (x, y), (8, -3), textcoords="offset points", fontsize=7, color="gray")
    axes.set_xticks(range(len(RECIPES) - 1), RECIPES[1:], rotation=20, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(-0.4, len(RECIPES) - 1.2), ylim=(len(rows) - 0.5, -0.5))


# ---------------------------------------------------------------- numerics


def grid(fmt: fp8.Format) -> np.ndarray:
    """Return every positive finite value of a format, float32, ascending."""
    values = fp8.numerics.decode(np.arange(256, dtype=np.uint8), fmt)
    return np.unique(values[np.isfinite(values) & (values > 0)])


def worst_relative_error(x: np.ndarray, fmt: fp8.Format, bins: np.ndarray) -> np.ndarray:
    """Return the largest |q - x| / x of the values in each bin of log2 x."""
    error = np.abs(fp8.dequantize(fp8.quantize(x, np.float32(1), fmt), np.float32(1), fmt) - x) / x
    place = np.digitize(np.log2(x), bins) - 1
    return np.array([error[place == i].max() for i in range(len(bins) - 1)])


def share_lost(scales: np.ndarray, fmt: fp8.Format, n: int = 1 << 16) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each scale, the shares of N(0, 1) values that become 0 and that saturate."""
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    zeros, saturated = [], []
    for scale in scales.astype(np.float32):
        q = fp8.numerics.decode(fp8.quantize(x, scale, fmt), fmt)
        zeros.append(np.mean(q == 0))
        saturated.append(np.mean(np.abs(x * scale) > fmt.max))
    return np.array(zeros), np.array(saturated)


def delayed_and_dynamic(amax: np.ndarray, length: int, fmt: fp8.Format) -> dict[str, np.ndarray]:
    """Return the scales that each way uses at each step of a sequence of amax values."""
    history = np.zeros(length, np.float32)
    delayed, scale = [], fp8.amax_to_scale(amax[:1], fmt)[0]
    for value in amax:
        delayed.append(scale)
        history, reduced = fp8.numerics.update_history(history, value, algo="max")
        scale = np.float32(fp8.amax_to_scale(np.float32([reduced]), fmt)[0])
    return {"dynamic": fp8.amax_to_scale(amax, fmt), "delayed": np.array(delayed)}


def amax_with_spike(steps: int = 60) -> np.ndarray:
    """Return amax values that drift down, jump up eightfold for one step and drift on."""
    amax = np.float32(4) * np.float32(0.985) ** np.arange(steps, dtype=np.float32)
    amax *= np.exp(np.random.default_rng(1).normal(0, 0.05, steps)).astype(np.float32)
    amax[25] *= 8
    return amax.astype(np.float32)


def folding_sqnr(spread: float) -> dict[str, float]:
    """Return the SQNR in dB of dx = dy w for three ways to keep `w`, whose rows differ by up to e^spread."""
    rng = np.random.default_rng(2)
    w = rng.standard_normal((256, 192)) * np.exp(rng.uniform(-spread, spread, (256, 1)))
    w, dy = w.astype(np.float32), rng.standard_normal((128, 256)).astype(np.float32)
    exact = dy.astype(np.float64) @ w.astype(np.float64)
    by_rows = rowwise(w, axis=1)
    folded = dy / by_rows.scale.T  # the scales of the weight's rows go into the gradient
    codes = fp8.numerics.decode(by_rows.data, fp8.E4M3)
    ways = {
        "folded, one copy": restored(folded, axis=1).astype(np.float64) @ codes.astype(np.float64),
        "two copies": restored(dy, axis=1).astype(np.float64) @ restored(w, axis=0).astype(np.float64),
        "one copy, cast again": restored(dy, axis=1).astype(np.float64)
        @ restored(restored(w, axis=1), axis=0).astype(np.float64),
    }
    return {name: float(10 * np.log10((exact**2).sum() / ((exact - got) ** 2).sum())) for name, got in ways.items()}


def rowwise(x: np.ndarray, axis: int) -> fp8.numerics.Quantized:
    """Return E4M3 codes of `x` with one scale per slice along `axis`."""
    return fp8.quantize_rowwise(np.ascontiguousarray(x), fp8.E4M3, axis=axis)


def restored(x: np.ndarray, axis: int) -> np.ndarray:
    """Return what is left of `x` after `rowwise`, float32."""
    q = rowwise(x, axis)
    return fp8.dequantize(q.data, q.scale, fp8.E4M3)


def draw_grids(axes: Axes) -> None:
    """Draw every positive value of each format as a tick on a logarithmic line."""
    for row, (name, fmt) in enumerate(FORMATS.items()):
        values = grid(fmt)
        axes.plot(values, np.full(len(values), row), "|", color=COLOURS[name], markersize=18)
        axes.annotate(f"{fmt.max:g}", (fmt.max, row), (6, -3), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="value", ylim=(len(FORMATS) - 0.4, -0.6), xlim=(2.0**-18, 2.0**18))
    axes.set_yticks(range(len(FORMATS)), FORMATS)
    axes.set_xscale("log", base=2)


def draw_rounding_error(axes: Axes) -> None:
    """Draw the largest relative rounding error at each magnitude."""
    bins = np.arange(-20, 18, 0.25)
    x = 2.0 ** np.random.default_rng(3).uniform(-20, 17.75, 1 << 18)
    for name in ("E4M3", "E5M2"):
        error = worst_relative_error(x.astype(np.float32), FORMATS[name], bins)
        axes.stairs(error, bins, label=name, color=COLOURS[name], linewidth=1.6)
    axes.set(yscale="log", ylim=(2.0**-6, 2), xlabel="log2 of the value", ylabel="largest relative error")
    axes.set_yscale("log", base=2)
    axes.legend(loc="lower right")


def draw_underflow(axes: Axes) -> None:
    """Draw how much of a Gaussian is lost at both ends as its scale moves."""
    powers = np.arange(-18, 20, 0.5)
    for name in ("E4M3", "E5M2"):
        zeros, saturated = share_lost(2.0**powers, FORMATS[name])
        axes.plot(powers, 100 * zeros, color=COLOURS[name], label=f"{name}: become 0")
        axes.plot(powers, 100 * saturated, "--", color=COLOURS[name], label=f"{name}: saturate")
    axes.set(xlabel="log2 of the scale", ylabel="% of N(0, 1) values")
    axes.legend()


def draw_delayed(axes: Axes) -> None:
    """Draw the scales of delayed and dynamic scaling around a spike of amax."""
    amax = amax_with_spike()
    scales = delayed_and_dynamic(amax, 16, fp8.E4M3)
    steps = np.arange(len(amax))
    for (name, scale), style in zip(scales.items(), ("-", "--"), strict=True):
        axes.step(steps, np.minimum(scale * amax, 2000), style, where="mid", label=f"{name}: scale * amax")
    axes.axhline(fp8.E4M3.max, color="grey", linewidth=0.8)
    axes.annotate("448: above it values saturate", (0, fp8.E4M3.max), (0, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="step", ylabel="largest scaled value", yscale="log", ylim=(20, 5000))
    axes.legend(loc="upper right")


def draw_folding(axes: Axes) -> None:
    """Draw the accuracy of the backward product for three ways to keep a row-wise weight."""
    spreads = np.arange(0, 4.25, 0.5)
    sqnr = [folding_sqnr(spread) for spread in spreads]
    for name, style in zip(sqnr[0], ("o-", "s--", "x:"), strict=True):
        axes.plot(spreads, [way[name] for way in sqnr], style, label=name)
    axes.set(xlabel="rows of the weight differ by up to e^(+-x)", ylabel="SQNR of dx, dB")
    axes.legend()


def draw_speedups(axes: Axes) -> None:
    """Draw how fast a Llama block and eager layers ran on the H100 beside bfloat16: a bar each, the fastest first."""
    lines = (RESULTS / "gpu-nvidia-h100-80gb-hbm3-times.md").read_text().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names, place = [], 0
    for part, words in (("blocks", "block, compiled"), ("layers", "layers, eager")):
        for _, who, ratio, milliseconds, _ in (row for row in rows if row[0] == part):
            library = who.partition("-")[0]
            colour = {"bf16": "gray", "ours": COLOURS["E4M3"], "torchao": COLOURS["E5M2"]}[library]
            axes.barh(place, float(ratio.rstrip("x")), color=colour)
            axes.text(float(ratio.rstrip("x")) + 0.01, place, milliseconds, va="center", color="gray", fontsize=8)
            names.append((place, f"{who.replace('-', ' ')} ({words})"))
            place += 1
        place += 1
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(*zip(*names, strict=True), fontsize=8)
    axes.set_ylim(place - 1.4, -0.6)
    axes.set_xlim(0, 1.5)
    axes.set_xlabel("speed beside bf16, forward and backward; milliseconds")


# ---------------------------------------------------------------- the primer


def draw_cast(axes: Axes) -> None:
    """Draw the magnitudes of a tensor before and after its scale, above the values of both formats."""
    x = np.abs(np.random.default_rng(0).normal(size=4000) * 2.0**-11).astype(np.float32)
    scale = fp8.amax_to_scale(x.max(), fp8.E4M3)
    for data, base, colour, name in ((x, 3.2, "gray", "tensor"), (x * scale, 2.1, "#1a7f37", "tensor x scale")):
        counts, edges = np.histogram(np.log2(data), bins=np.arange(-26, 17, 0.5))
        axes.fill_between(edges[:-1], base, base + 0.9 * counts / counts.max(), step="post", color=colour, alpha=0.5)
        axes.text(16.5, base + 0.1, name, color=colour, ha="right")
    for name, base in (("E4M3", 1.1), ("E5M2", 0.2)):
        values = fp8.numerics.decode(np.arange(1, 128, dtype=np.uint8), FORMATS[name])
        values = np.log2(values[np.isfinite(values)])
        axes.vlines(values, base, base + 0.5, color=COLOURS[name], linewidth=0.7)
        axes.text(values.min() - 0.4, base + 0.15, f"{name}  0", color=COLOURS[name], ha="right")
        axes.text(values.max() + 0.4, base + 0.15, f"{2 ** values.max():g}", color=COLOURS[name])
    axes.annotate("", (np.log2(448), 2.75), (np.log2(x.max()), 3.25), arrowprops={"arrowstyle": "->", "color": "gray"})
    axes.set(
        xlim=(-22, 17), ylim=(0, 4.2), yticks=[], xlabel="magnitude: 2 to the power of; a line is a value of the format"
    )
    axes.spines["left"].set_visible(False)


def draw_granularity(axes: Axes) -> None:
    """Draw one matrix for each granularity, a colour for each scale."""
    rows, columns = np.mgrid[0:8, 0:8]
    kinds = {
        "tensorwise": 0 * rows,
        "row-wise": rows,
        "block-wise, 1 x 4 here": 2 * rows + columns // 4,
        "block-wise, 4 x 4 here": 2 * (rows // 4) + columns // 4,
    }
    for place, (name, scales) in enumerate(kinds.items()):
        left = 10 * place
        colours = (scales * 5 % 16) / 16
        axes.imshow(colours, extent=(left, left + 8, 0, 8), cmap="tab20c", vmin=0, vmax=1)
        axes.vlines(range(left, left + 9), 0, 8, color="white", linewidth=0.5)
        axes.hlines(range(9), left, left + 8, color="white", linewidth=0.5)
        axes.text(left, 8.6, name)
    axes.set(xlim=(-0.5, 39), ylim=(-0.5, 10))
    axes.axis("off")


def draw_gathers(axes: Axes) -> None:
    """Draw the bytes of a weight that FSDP2 sends in a step, in order, as `benchmarks.wire_bytes` counted them."""
    found = (RESULTS / "wire_bytes.md").read_text()
    gradients_in = ("float32", "float32", "bfloat16", "FP8")
    names = [f"{who}; gradients {dtype}" for who, dtype in zip(("bf16", "tensorwise") * 2, gradients_in, strict=True)]
    for place, name in enumerate(names):
        line = next(line for line in found.splitlines() if line.startswith(f"| {name} |"))
        gathers, gradients = map(float, line.split("|")[3:5])
        parts = (("forward", gathers / 2), ("backward", gathers / 2), ("gradients", gradients))
        left = 0.0
        for (part, width), colour in zip(parts, COLOURS.values(), strict=False):
            axes.barh(place, width, left=left, color=colour, height=0.6)
            axes.text(
                left + width / 2, place, f"{part}\n{width:.2f}", ha="center", va="center", fontsize=7.5, color="white"
            )
            left += width
        axes.text(left + 0.08, place, f"{left:.2f}", va="center", color="gray")
    axes.set_yticks(range(len(names)), [name.replace("; ", ",\n") for name in names])
    axes.set(
        ylim=(3.5, -0.5), xlabel="bytes per parameter and step; the amax all-reduce adds 4 bytes for a whole weight"
    )


DRAWINGS: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "grids": (draw_grids, (6.4, 2.2)),
    "rounding-error": (draw_rounding_error, (6.4, 3.2)),
    "underflow": (draw_underflow, (6.4, 3.2)),
    "delayed": (draw_delayed, (6.4, 3.2)),
    "folding": (draw_folding, (6.4, 3.2)),
    "losses": (draw_losses, (6.4, 1.6)),
    "differences": (draw_differences, (6.4, 4.0)),
    "links": (draw_links, (6.4, 3.2)),
    "cast": (draw_cast, (7.2, 3.4)),
    "granularity": (draw_granularity, (7.2, 2.0)),
    "gathers": (draw_gathers, (7.2, 3.2)),
    "speedups": (draw_speedups, (7.2, 4.6)),
}
