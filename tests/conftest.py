"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.group import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Worker processes with a DeepSpeed engine in them, shared by the whole run."""
    made = Lab()
    yield made
    made.close()
