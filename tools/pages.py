"""The parts of pages and settings that follow from data: `python -m tools.pages` writes them, a test compares them.

A part stands between two comments that name it, `<!-- status: begin -->` and `<!-- status: end -->`, or in TOML and
YAML `# urls: begin` and `# urls: end`. Sources: `fp8_common/status.json` (what was run where), of
`benchmarks/results` `demo.json` (the report of a whole demo), `jax-layers.json` (stacked JAX layers), `masters.json`
(masters in three bytes, moments in FP8) and `gradient_convergence.json` (training with every wire in FP8),
`architectures.json` (other people's models), and the addresses in `[tool.fp8-plugins]` of the root's pyproject.toml.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import architectures
from tools import gradient_runs as runs_of_gradients

ROOT = Path(__file__).resolve().parents[1]
STATUS = Path("shared-kernels/src/fp8_common/status.json")
DEMO = Path("benchmarks/results/demo.json")
JAX_LAYERS = Path("benchmarks/results/jax-layers.json")
MASTERS = Path("benchmarks/results/masters.json")
GRADIENT_RUNS = Path("benchmarks/results/gradient_convergence.json")
ARCHITECTURES = Path("benchmarks/results/architectures.json")
PART = re.compile(r"^( *)(<!--|#) ([a-z][\w -]*): begin( -->|)\n(.*?)^\1\2 \3: end\4$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/**/*.md", "mkdocs.yml", "CITATION.cff", "shared-kernels/*.toml", "packages/*/*.toml")


def read_status() -> dict[str, Any]:
    """Return what was run on which device."""
    return json.loads((ROOT / STATUS).read_text())


def addresses() -> dict[str, str]:
    """Return where the repository and the site are published; empty strings where they are not."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["fp8-plugins"]


# ---------------------------------------------------------------- what was run where


def status() -> str:
    """Return the table of devices; columns that say the same of every device are one."""
    found = read_status()
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, title in found["columns"].items():
        cells = tuple(", ".join(device["status"][name]) for device in found["devices"])
        groups.setdefault(cells, []).append(title)
    heads = [", ".join(titles) for titles in groups.values()]
    lines = [f"| device | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for place, device in enumerate(found["devices"]):
        lines.append(f"| {device['title']} | {' | '.join(cells[place] for cells in groups)} |")
    return "\n".join(lines)


def words() -> str:
    """Return what the words of the table mean."""
    return "\n".join(f"- **{word}**: {meaning}." for word, meaning in read_status()["words"].items())


def status_of(names: Sequence[str]) -> str:
    """Return one sentence: for some columns, which devices have which words."""
    found = read_status()
    groups: dict[str, list[str]] = {}
    for device in found["devices"]:
        usual = device["status"][names[0]]
        others = {name: [word for word in device["status"][name] if word not in usual] for name in names}
        apart = [f"{name}: {', '.join(more)}" for name, more in others.items() if more]
        said = ", ".join(usual) + (f" ({'; '.join(apart)})" if apart else "")
        groups.setdefault(said, []).append(device["title"])
    parts = [f"{said} on {'; '.join(devices)}" for said, devices in groups.items()]
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def status_note(link: str, names: Sequence[str]) -> Callable[[], str]:
    """Return the part of a guide that says so, with a link to the whole table."""
    return lambda: f"**Status** ([all devices]({link})). {status_of(names)}"


# ---------------------------------------------------------------- the demo


def demo() -> str:
    """Return what the kept demo found, with what it costs."""
    report = json.loads((ROOT / DEMO).read_text())
    part, machine = report["torch_fsdp"], report["machine"]
    bf16, fp8 = part["runs"]["bf16"], part["runs"]["fp8"]
    share = fp8["fp8_weight_bytes_per_step"] / bf16["fp8_weight_bytes_per_step"]
    apart = [f"{100 * (b / a - 1):+.2f} %" for a, b in zip(losses(bf16), losses(fp8), strict=True)]
    seeds, spread = len(apart), max(losses(bf16)) - min(losses(bf16))
    lines = [
        f"| `nox -s demo -- --steps {part['steps']} --seeds {seeds}`, FSDP2 part | bf16 | FP8 |",
        "|---|---|---|",
        f"| linear weights, received by a rank each step | {megabytes(bf16)} | {megabytes(fp8)}, {share:.3f}x |",
        f"| held-out loss after {part['steps']} steps, nats a byte | {bf16['val_loss']:.4f} | {fp8['val_loss']:.4f} |",
        f"| the same, FP8 against bf16 of the same seed | | {', '.join(apart)} |",
    ]
    if report.get("quiet"):  # times of a machine that did something else besides are not shown
        lines.append(
            f"| speed on this CPU, FP8 products emulated | 1 | {fp8['tokens_per_s'] / bf16['tokens_per_s']:.2f} |"
        )
    where = (
        f"{machine['processor']}, {machine['cores']} cores, {part['ranks']} processes, {part['params']:,} parameters, "
        f"torch {report['versions']['torch']}; `{DEMO}`."
    )
    between = f" Seeds of bf16 lie {spread:.4f} apart." if seeds > 1 else " One seed: bf16's own spread is not known."
    return "\n".join([*lines, "", where + between])


def losses(run: Mapping[str, Any]) -> list[float]:
    """Return the held-out loss of each seed of a run."""
    return [seed["val_loss"] for seed in run.get("seeds", [run])]


def megabytes(run: Mapping[str, Any]) -> str:
    """Return the bytes of linear weights as text."""
    return f"{run['fp8_weight_bytes_per_step'] / 1e6:.2f} MB"


# ---------------------------------------------------------------- stacked JAX layers


GOALS = {
    "time / flax direct": 0.7,
    "temporaries / flax direct": 1.0,
    "lower / flax direct": 1.2,
    "compile / flax direct": 1.2,
}
"""The greatest figures with which a column reaches its goal."""


def jax_layers() -> str:
    """Return the table of `benchmarks.bench_jax_layers`; what misses its goal is bold."""
    rows = json.loads((ROOT / JAX_LAYERS).read_text())["rows"]
    others = ["products alone / flax direct", "equations", "operations", "operations, flax direct"]
    heads = ["case", *GOALS, *others]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        cells = [f"**{row[name]}**" if row[name] > goal else str(row[name]) for name, goal in GOALS.items()]
        cells += [f"{row[name]:,}" if name in row else "-" for name in others]
        lines.append(f"| {' | '.join([row['case'], *cells])} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- masters in three bytes


def masters_memory() -> str:
    """Return the table of bytes that `benchmarks.bench_masters` measured."""
    found = json.loads((ROOT / MASTERS).read_text()).get("memory")
    if found is None:
        return "Not measured yet: `python -m benchmarks.bench_masters --only memory`."
    kinds = {
        "codes": "codes, scales",
        "masters": "masters",
        "moments": "moments",
        "gradients": "gradients",
        "rss": "resident",
        "peak_rss": "at the peak",
    }
    lines = [f"| bytes for each of {found['parameters']:,} weights | {' | '.join(kinds.values())} |"]
    lines.append("|---|" + "---:|" * len(kinds))
    for way, row in found["bytes_per_parameter"].items():
        lines.append(f"| {way} | {' | '.join(f'{row[kind]:.2f}' for kind in kinds)} |")
    return "\n".join(lines)


def masters_losses() -> str:
    """Return the table of held-out losses that `benchmarks.bench_masters` measured."""
    found = json.loads((ROOT / MASTERS).read_text()).get("held_out_loss")
    if found is None:
        return "Not measured yet: `python -m benchmarks.bench_masters --only loss`."
    seeds = range(max(len(row) for row in found["losses"].values()))
    heads = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [f"| moments, held-out loss after {found['steps']} steps, nats a byte | {heads} |"]
    lines.append("|---|" + "---:|" * len(seeds))
    for way, row in found["losses"].items():
        lines.append(f"| {way} | {' | '.join(f'{loss:.4f}' for loss in row)} |")
    exact = found["losses"]["float32"]
    lines += [
        "",
        f"Seeds of float32 moments are up to {max(exact) - min(exact):.4f} apart. Beside the same seed of these:",
    ]
    for way, row in found["losses"].items():
        apart = [loss - other for loss, other in zip(row, exact, strict=False)]
        if way != "float32" and apart:
            least, most = min(apart), max(apart)
            lines.append(f"- {way}: {sum(apart) / len(apart):+.4f} on average, {least:+.4f} to {most:+.4f}")
    return "\n".join(lines)


# ---------------------------------------------------------------- gradients as FP8 codes


def gradient_runs() -> str:
    """Return the table of held-out losses that `benchmarks.gradient_convergence` measured, and what follows from it."""
    found = json.loads((ROOT / GRADIENT_RUNS).read_text())
    settings = found["settings"]
    what = f"{settings['steps']} steps of {settings['params']:,} parameters on {settings['ranks']} ranks."
    return f"{runs_of_gradients.table(found)}\n\n{what} {runs_of_gradients.verdict(found)}"


# ---------------------------------------------------------------- addresses


def urls() -> str:
    """Return the table of a package's metadata."""
    names = {"Repository": addresses()["repository"], "Documentation": addresses()["site"]}
    lines = [f'{name} = "{address}"' for name, address in names.items() if address]
    return "\n".join(["[project.urls]", *lines] if lines else ["# none yet: see [tool.fp8-plugins] in the root"])


def site() -> str:
    """Return the addresses for mkdocs.yml."""
    root, repository = addresses()["site"].rstrip("/"), addresses()["repository"]
    # each version lies in a folder of its own, see tools/versions.py
    lines = [f"site_url: {root}/{version()}/", "extra: { version: { provider: mike } }"] if root else []
    return "\n".join([*lines, f"repo_url: {repository}"] if repository else lines) or "# none yet"


def version() -> str:
    """Return the version of the packages."""
    return str(tomllib.loads((ROOT / "shared-kernels/pyproject.toml").read_text())["project"]["version"])


def citation() -> str:
    """Return the address for CITATION.cff."""
    address = addresses()["repository"]
    return f"repository-code: {address}" if address else "# none yet"


RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
PARTS: dict[str, Callable[[], str]] = {
    "status": status,
    "words": words,
    "status of products": status_note("../status.md", RECIPES),
    "status of casts": status_note("../status.md", ("casts",)),
    "status of collectives": status_note("../status.md", ("collectives",)),
    "status of choices": status_note("status.md", RECIPES),
    "demo": demo,
    "jax layers": jax_layers,
    "masters memory": masters_memory,
    "masters losses": masters_losses,
    "gradient runs": gradient_runs,
    "architectures": lambda: architectures.shares(json.loads((ROOT / ARCHITECTURES).read_text())),
    "architectures trained": lambda: architectures.twins(json.loads((ROOT / ARCHITECTURES).read_text())),
    "urls": urls,
    "site": site,
    "citation": citation,
}
"""What stands between the comments, by name."""


def rendered(text: str) -> str:
    """Return a page with every part that has a name here brought up to date."""

    def part(match: re.Match[str]) -> str:
        indent, opening, name, closing, _ = match.groups()
        if name not in PARTS:
            return match[0]
        body = "".join(f"{indent}{line}\n" if line else "\n" for line in PARTS[name]().splitlines())
        return f"{indent}{opening} {name}: begin{closing}\n{body}{indent}{opening} {name}: end{closing}"

    return PART.sub(part, text)


def files() -> Iterator[Path]:
    """Yield every file that may hold such parts."""
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


def main() -> int:
    """Write what has changed, and name it."""
    for path in files():
        before = path.read_text()
        if (after := rendered(before)) != before:
            path.write_text(after)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
