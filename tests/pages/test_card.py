"""The picture that other sites show beside a link has the size that pages say, and today's texts."""

import struct

from benchmarks import plot_card as card
from tests.helpers.repository import ROOT


def test_the_card_has_the_size_and_the_texts_of_the_site():
    data = card.CARD.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == card.SIZE
    head = data[: data.index(b"IDAT")]
    assert "\n".join(card.texts()).encode("latin-1") in head, "run python -m benchmarks.plot_card"


def test_pages_name_the_card_and_its_size():
    template = (ROOT / "tools/site/main.html").read_text()
    assert card.CARD.relative_to(ROOT / "docs").as_posix() in template
    assert all(f'content="{number}"' in template for number in card.SIZE)
    assert "custom_dir: tools/site" in (ROOT / "mkdocs.yml").read_text()
