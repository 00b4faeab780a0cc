"""docs/gpu.md says what the files under docs/results say."""

from __future__ import annotations

import pytest

from tests.gpu import page


def test_the_page_is_current() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "python -m tests.gpu.page --write"


def test_a_table_without_a_place_is_an_error() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"no place '<!-- waits -->'"):
        page.filled(text.replace("<!-- waits -->", ""))


def test_every_result_is_shown() -> None:
    """A file that no page reads is a measurement that nobody sees."""
    shown = "".join((page.ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gpu.md", "scale.md"))
    assert [path.name for path in page.RESULTS.glob("*.json") if path.name not in shown] == []
