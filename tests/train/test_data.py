"""The corpus and the order in which its windows are drawn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.config import DataConfig
from meshwright.train.data import SEPARATOR, Corpus, Sampler, find_sources, held_out_windows, split
from meshwright.train.permutation import permute

FILES = 60


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of small files, each with its own name as its text."""
    folder = tmp_path / "texts"
    for number in range(FILES):
        path = folder / f"part-{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number:02}>")
    return folder


@pytest.fixture
def data(texts: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(files=(f"{texts}/**/*.txt",), held_out=5, cache=str(tmp_path / "cache"))


@settings(deadline=None)
@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_a_permutation_takes_every_place_once(size: int, key: str) -> None:
    assert sorted(permute(place, size, key) for place in range(size)) == list(range(size))


@given(size=st.integers(1, 2**70), data=st.data())
def test_a_permutation_of_any_size_stays_inside(size: int, data: st.DataObject) -> None:
    assert 0 <= permute(data.draw(st.integers(0, size - 1)), size, "key") < size


def test_a_permutation_mixes() -> None:
    size = 1000
    order = np.array([permute(place, size, "0/0") for place in range(size)])
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.1
    assert (np.diff(order) == 1).mean() < 0.01


@settings(deadline=None)
@given(windows=st.integers(1, 50), sequence=st.integers(1, 9), rest=st.integers(0, 8), seed=st.integers())
def test_every_pass_draws_every_window_once(windows: int, sequence: int, rest: int, seed: int) -> None:
    tokens = np.arange(windows * sequence + 1 + min(rest, sequence - 1)) % 251
    sampler = Sampler(tokens.astype(np.uint8), sequence, seed)
    assert sampler.windows == windows
    for epoch in range(3):
        drawn = {sampler.window(epoch * windows + place).tobytes() for place in range(windows)}
        expected = {sampler.tokens[at * sequence : (at + 1) * sequence + 1].tobytes() for at in range(windows)}
        assert drawn == expected


def test_a_sample_depends_on_seed_and_number_only() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    numbers = [977, 3, 10**12, 3, 0]
    forth = [Sampler(tokens, 16, 7).window(number) for number in numbers]
    sampler = Sampler(tokens, 16, 7)
    back = [sampler.window(number) for number in reversed(numbers)][::-1]
    assert all((a == b).all() for a, b in zip(forth, back, strict=True))
    other = [Sampler(tokens, 16, 8).window(number) for number in numbers]
    assert not all((a == b).all() for a, b in zip(forth, other, strict=True))


def test_passes_differ_in_their_order() -> None:
    sampler = Sampler(np.arange(201).astype(np.uint8), 2, 0)
    first, second = ([int(sampler.window(epoch * 100 + place)[0]) for place in range(100)] for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_held_out_windows_are_evenly_spaced() -> None:
    tokens = np.arange(101).astype(np.uint8)
    assert held_out_windows(tokens, 10, 5)[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert held_out_windows(tokens, 10, 5).shape == (5, 11)
    assert held_out_windows(tokens, 10, 99).shape == (10, 11), "as many as there are"


def test_no_file_is_on_both_sides_and_none_is_lost(data: DataConfig) -> None:
    corpus = Corpus.open(data)
    train, held_out = (set(bytes(part).split(SEPARATOR)[:-1]) for part in (corpus.train, corpus.held_out))
    assert train.isdisjoint(held_out)
    assert train | held_out == {f"<{number:02}>".encode() for number in range(FILES)}
    assert FILES / 15 <= len(held_out) <= FILES / 2


def test_a_file_stays_on_its_side_when_others_come(data: DataConfig, texts: Path) -> None:
    before = set(bytes(Corpus.open(data).held_out).split(SEPARATOR))
    (texts / "new.txt").write_text("<new>")
    after = set(bytes(Corpus.open(data).held_out).split(SEPARATOR))
    assert after - {b"<new>"} == before


def test_the_same_texts_in_another_folder_are_the_same_corpus(data: DataConfig, texts: Path, tmp_path: Path) -> None:
    digest = Corpus.open(data).digest
    texts.rename(tmp_path / "elsewhere")
    moved = DataConfig(files=(f"{tmp_path}/elsewhere/**/*.txt",), held_out=5, cache=data.cache)
    assert Corpus.open(moved).digest == digest


def test_few_files_still_leave_something_to_train_on_and_to_evaluate_on(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("x" * 100)
    train, held_out = split(find_sources((f"{tmp_path}/*.txt",)), 20)
    assert (len(train), len(held_out)) == (1, 1)


def test_a_lone_file_is_cut_in_two(tmp_path: Path) -> None:
    path = tmp_path / "only.txt"
    path.write_text("t" * 90 + "h" * 10)
    corpus = Corpus.open(DataConfig(files=(str(path),), held_out=10, cache=str(tmp_path)))
    assert bytes(corpus.train) == b"t" * 90 + SEPARATOR
    assert bytes(corpus.held_out) == b"h" * 10 + SEPARATOR


def test_a_file_named_by_two_globs_is_read_once(texts: Path) -> None:
    assert len(find_sources((f"{texts}/*/00.txt", f"{texts}/part-0/*.txt"))) == FILES // 3


def test_the_cache_is_used_until_a_file_changes(data: DataConfig, texts: Path) -> None:
    first = Corpus.open(data)
    cache = Path(str(data.cache))
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert Corpus.open(data).digest == first.digest
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written
    changed = texts / "part-0" / "00.txt"
    changed.write_text("changed")
    assert Corpus.open(data).digest != first.digest


@pytest.mark.parametrize("suffix", [".u8", ".json"])
def test_a_damaged_cache_is_built_anew(data: DataConfig, suffix: str) -> None:
    digest = Corpus.open(data).digest
    (entry,) = Path(str(data.cache)).glob(f"*{suffix}")
    entry.write_bytes(entry.read_bytes()[:-5])
    corpus = Corpus.open(data)
    assert corpus.digest == digest
    assert len(corpus.train) + len(corpus.held_out) == FILES * 5


def test_several_builders_at_once_do_not_spoil_the_cache(data: DataConfig) -> None:
    together = threading.Barrier(4)

    def build(_: int) -> str:
        together.wait()
        corpus = Corpus.open(data)
        return f"{corpus.digest} {len(corpus.train)} {bytes(corpus.train[-5:])!r}"

    with ThreadPoolExecutor(4) as builders:
        answers = set(builders.map(build, range(8)))
    assert len(answers) == 1
    assert len(list(Path(str(data.cache)).iterdir())) == 2, "no draft is left"


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    sources = find_sources(())
    names = {source.name for source in sources}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name for name in names)
    assert sum(source.path.stat().st_size for source in sources) > 10_000_000


def test_a_glob_without_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r'data.files: ".*/\*.md" matches no file'):
        find_sources((f"{tmp_path}/*.md",))
    with pytest.raises(ValueError, match="matches only folders and empty files"):
        find_sources((f"{tmp_path}/*.txt",))


def test_a_cache_folder_that_cannot_be_made_is_named(data: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/cache: Not a directory; set data.cache"):
        Corpus.open(DataConfig(files=data.files, cache=str(tmp_path / "file" / "cache")))


def test_too_little_text_says_how_much_there_is_and_what_fits() -> None:
    tokens = np.zeros(90, np.uint8)
    with pytest.raises(ValueError, match=r"training text has 90 tokens.* \+ 1 = 129; set model.sequence to at most 89"):
        Sampler(tokens, 128, 0)
    assert Sampler(tokens, 89, 0).windows == 1
    with pytest.raises(ValueError, match="held-out text has 90 tokens"):
        held_out_windows(tokens, 128, 4)
