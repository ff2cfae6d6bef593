"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for the pool starts rank processes, and belongs to that ring."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The session's rank processes."""
    ranks = RankPool()
    yield ranks
    ranks.close()
