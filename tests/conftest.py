"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The session's rank processes."""
    ranks = RankPool()
    yield ranks
    ranks.close()
