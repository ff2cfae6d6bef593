"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import RankPool

POOLS = {"pool", "gloo_pool"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a pool starts rank processes, and belongs to that ring."""
    for item in items:
        if POOLS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The session's rank processes, which share memory as the ranks of one host do."""
    yield from _ranks("auto")


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[RankPool]:
    """Rank processes that share nothing, as on separate hosts: where bytes held and sent are those of the papers."""
    yield from _ranks("gloo")


def _ranks(transport: str) -> Iterator[RankPool]:
    ranks = RankPool(transport=transport)
    yield ranks
    ranks.close()
