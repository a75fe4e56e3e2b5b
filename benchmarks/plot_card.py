"""Draws the picture that other sites show beside a link to the documentation: `python -m benchmarks.plot_card`.

It needs matplotlib, which the development environment has.
"""

from pathlib import Path

from tools.packages import PACKAGES

ROOT = Path(__file__).parents[1]
CARD = ROOT / "docs/assets/card.png"
SIZE = (1200, 630)
"""Pixels; what `tools/site/main.html` says of the picture."""
DARK, LIGHT, QUIET = "#14213d", "#ffffff", "#b8c4de"


def texts() -> list[str]:
    """Return what the card says: the name and the description of the site, and the packages."""
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    said = dict(line.split(": ", 1) for line in lines if line.startswith("site_") and ": " in line)
    return [said["site_name"], said["site_description"], *PACKAGES]


def draw(path: Path) -> None:
    """Write the card; its texts are in the file as well, so that an old one is noticed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name, description, *rest = texts()
    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor=DARK)
    FigureCanvasAgg(figure)
    figure.text(0.07, 0.70, name, size=60, weight="bold", color=LIGHT)
    figure.text(0.07, 0.52, description.replace(", and", ",\nand"), size=24, color=LIGHT, linespacing=1.5)
    figure.text(0.07, 0.16, "   ".join(rest), size=20, color=QUIET, family="monospace")
    figure.savefig(path, metadata={"Description": "\n".join([name, description, *rest]), "Software": None})


if __name__ == "__main__":
    draw(CARD)
