"""What the documents say of convergence equals benchmarks/results/convergence.json, and names its number of seeds."""

import json
import re
import statistics

import pytest

from tests.helpers.repository import ROOT

RUNS = json.loads((ROOT / "benchmarks/results/convergence.json").read_text())["runs"]
PAGE, GUIDE = "docs/numerics/convergence.md", "docs/guides/te-init.md"


def text(page):
    return re.sub(r"\s+", " ", (ROOT / page).read_text())


def differences(package, way, control):
    """Return how far a way ends from its control, in percent of the held-out loss, seed by seed."""
    seeds = sorted(int(name.split("/")[2]) for name in RUNS if name.startswith(f"{package}/{way}/"))
    loss = {(one, seed): RUNS[f"{package}/{one}/{seed}"]["val_loss"] for one in (way, control) for seed in seeds}
    return [100 * (loss[way, seed] / loss[control, seed] - 1) for seed in seeds]


def error(found):
    return statistics.stdev(found) / len(found) ** 0.5


@pytest.mark.parametrize(
    ("package", "way", "control", "seeds"),
    [
        ("fp8-te-init", "dequantized", "float32", 8),
        ("fp8-te-init", "cpu copy", "float32", 8),
        ("fp8-te-init", "dither", "float32", 8),
        ("fp8-torch-fsdp", "tensorwise", "bf16", 3),
        ("fp8-jax-owg", "delayed", "bf16", 3),
    ],
)
def test_the_table_has_every_seed_of_the_measurement(package, way, control, seeds):
    found = differences(package, way, control)
    row = re.search(rf"^\| {package} \| {re.escape(way)} \| (.*) \|$", (ROOT / PAGE).read_text(), re.MULTILINE)
    number, _, _, difference, each = row[1].split(" | ")
    assert int(number) == len(found) == seeds
    assert difference == f"{statistics.mean(found):+.2f} ± {error(found):.2f} %"
    assert each == ", ".join(f"{one:+.2f} %" for one in found)


def test_the_sentences_on_masters_from_codes_and_from_copies_are_those_of_eight_seeds():
    codes, copies = (differences("fp8-te-init", way, "float32") for way in ("dequantized", "cpu copy"))
    # of one sign the guide's claim would be another one; so the signs are part of what is said
    assert min(codes) < 0 < max(codes)
    low, high, above = f"{-min(codes):.2f}", f"{max(codes):.2f}", sum(one > 0 for one in codes)
    mean, own = f"{statistics.mean(codes):.2f} ± {error(codes):.2f} %", f"{error(copies):.2f} %"
    guide, page = text(GUIDE), text(PAGE)
    assert f"masters from codes ended {mean} of the held-out loss above float32" in guide
    assert f"(mean and standard error of eight seeds, from -{low} to +{high} %)" in guide
    assert f"masters from the copy at {statistics.mean(copies):.2f} ± {own}" in guide
    assert f"(from {min(copies):.2f} to {max(copies):+.2f} %)" in guide
    words = {4: "four", 5: "five", 6: "six", 7: "seven"}
    assert (
        f"Over eight seeds they end between {low} % below and {high} % above float32, {words[above]} of eight" in page
    )
    assert f"above: {mean} on average" in page


def test_no_document_calls_few_seeds_every_seed():
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md"), ROOT / "README.md"]
    assert not [str(page) for page in pages if "every seed" in page.read_text()]


def test_the_demo_says_that_one_seed_says_no_more():
    assert "one seed says no more" in (ROOT / "demos/te_init/__main__.py").read_text()
