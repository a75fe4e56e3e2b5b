"""Boxes of the text in a drawn figure: which of them meet, and which are cut off."""

from collections.abc import Iterator
from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

ROOM = 0.5
"""Points that boxes may share: glyphs do not fill their boxes."""


def texts(figure: Figure) -> Iterator[Text]:
    """Yield every text that is seen: titles, labels, ticks inside of the axes' limits, legends, annotations."""
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            yield from (label for place, label in ticks if low <= place <= high)
        if legend := axes.get_legend():
            yield from legend.get_texts()


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Draw a figure and return (text, box in pixels) of everything that is written in it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    seen = [text for text in texts(figure) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in seen]


def complaints(figure: Figure) -> list[str]:
    """Return a sentence for each pair of texts that meet, and for each text that is not wholly inside."""
    found = boxes(figure)
    small = [(name, box.padded(-ROOM * figure.dpi / 72)) for name, box in found]
    wrong = [f"{a!r} and {b!r} meet" for (a, one), (b, other) in combinations(small, 2) if one.overlaps(other)]
    inside = figure.bbox.padded(1)
    cut = (name for name, box in found if not all(inside.contains(*corner) for corner in (box.min, box.max)))
    return [*wrong, *(f"{name!r} is cut off" for name in cut)]
