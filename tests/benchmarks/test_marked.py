"""Text between two marks of a page: everything else stays, and a missing mark loses nothing."""

import pytest

from benchmarks.marked import between_marks

PAGE = "before\n\n<!-- a -->\nold\n<!-- end -->\n\nafter\n"


def test_text_between_the_marks_is_replaced_and_all_else_stays():
    once = between_marks(PAGE, "<!-- a -->\n", "\n<!-- end -->", "new\nlines")
    assert once == "before\n\n<!-- a -->\nnew\nlines\n<!-- end -->\n\nafter\n"
    assert between_marks(once, "<!-- a -->", "<!-- end -->", "old") == PAGE


@pytest.mark.parametrize("missing", ["<!-- a -->", "<!-- end -->"])
def test_a_missing_mark_is_named(missing):
    with pytest.raises(ValueError, match=missing):
        between_marks(PAGE.replace(missing, ""), "<!-- a -->", "<!-- end -->", "new")
