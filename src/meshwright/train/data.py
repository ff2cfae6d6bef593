"""Text as tokens: files joined into one memory-mapped array of bytes, and the windows of it that training sees.

A token is a byte. Which window a sample is depends on the seed and the sample's global number only: not on the
layout, not on the rank, not on what was drawn before, so a batch is the same however it is divided, and a run may
stop and go on anywhere. Not where windows become tensors (the trainer), and nothing here imports torch.

    files, by name:   a.py  b.py  c.py  d.py ...         every n-th by the hash of its name is held out
    one cache file:   a.py 0 c.py 0 ... | b.py 0 ...     train | held out, each file followed by the separator
    windows:          [0 ... s] [s ... 2s] ...           s + 1 tokens: s inputs, and each one's successor as its target
    order:            a keyed permutation of the windows, another one for each pass over them
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.train.config import DataConfig
from meshwright.train.permutation import permute

Tokens = npt.NDArray[np.uint8]

SEPARATOR = b"\0"
"""Stands after every file, so that a model can learn where one ends."""

_CHUNK = 1 << 20
_PLENTY = 10_000_000
_NOT_TEXT = {"site-packages", "dist-packages"}  # what was installed differs between machines
_NOT_CLEAN = {"test", "tests", "idlelib"}  # broken on purpose, in odd encodings, or tables of data


@dataclass(frozen=True)
class Source:
    """A file of text, and the name it has wherever its folder lies: the path from where its glob begins."""

    path: Path
    name: str


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens, in two parts that share no file; `digest` is the sha256 of both.

    Args:
        train: (n,) uint8, memory-mapped.
        held_out: (n,) uint8, memory-mapped.
        digest: equal for equal text in an equal order, on any machine.
    """

    train: Tokens
    held_out: Tokens
    digest: str

    @classmethod
    def open(cls, data: DataConfig) -> Corpus:
        """The corpus that `data` describes: from the cache if its files have not changed, otherwise built there.

        Any number of processes may call this at once. Raises ValueError for a glob without a file, a file that cannot
        be read, or a cache folder that cannot be written.
        """
        sources = find_sources(data.files)
        folder, name = _cache_folder(data), f"corpus-{_fingerprint(sources, data.held_out)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            manifest = _Manifest.read(folder / f"{name}.json", folder / f"{name}.u8")
            if manifest is None:
                manifest = _write(folder, name, *split(sources, data.held_out))
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror}; set data.cache to a folder that can be written") from error
        whole = np.memmap(folder / f"{name}.u8", np.uint8, "r")
        return cls(whole[: manifest.train], whole[manifest.train :], manifest.sha256)


@dataclass(frozen=True, eq=False)
class Sampler:
    """The training samples in the order in which they are drawn.

    Args:
        tokens: (n,) the training part of a corpus.
        sequence: s, the inputs of one sample.
        seed: decides the order.

    Raises ValueError if the tokens do not make one window.
    """

    tokens: Tokens
    sequence: int
    seed: int

    def __post_init__(self) -> None:
        _windows(self.tokens, self.sequence, "training")

    @property
    def windows(self) -> int:
        """Samples of one pass over the text."""
        return _windows(self.tokens, self.sequence, "training")

    def window(self, index: int) -> Tokens:
        """Sample number `index` (0, 1, ... without end): (s + 1,) tokens. Each pass draws every window exactly once."""
        assert index >= 0, index
        epoch, place = divmod(index, self.windows)
        start = permute(place, self.windows, f"{self.seed}/{epoch}") * self.sequence
        return np.array(self.tokens[start : start + self.sequence + 1])


def held_out_windows(tokens: Tokens, sequence: int, count: int) -> Tokens:
    """`count` windows (or as many as there are) evenly spaced over the held-out `tokens`: (windows, s + 1).

    Raises ValueError if the tokens do not make one window.
    """
    available = _windows(tokens, sequence, "held-out")
    chosen = min(count, available)
    starts = [place * available // chosen * sequence for place in range(chosen)]
    return np.stack([np.array(tokens[start : start + sequence + 1]) for start in starts])


def find_sources(globs: tuple[str, ...]) -> tuple[Source, ...]:
    """The files that `globs` name, or without any the standard library of the running Python, sorted by name.

    Raises ValueError naming the glob that no file matches.
    """
    found: dict[Path, Source] = {}
    for pattern in globs:
        matches = [Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [match for match in matches if match.is_file() and match.stat().st_size]
        if not files:
            reason = "matches only folders and empty files" if matches else "matches no file"
            raise ValueError(f'data.files: "{pattern}" {reason} (looked from {Path.cwd()})')
        root = _root(os.path.expanduser(pattern))
        for path in files:
            found.setdefault(path.resolve(), Source(path.resolve(), path.relative_to(root).as_posix()))
    return tuple(
        sorted(found.values() if globs else _standard_library(), key=lambda source: (source.name, source.path))
    )


def split(sources: tuple[Source, ...], held_out: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces of text to train on and those held out: about one file in `held_out`, and at least one.

    The hash of a file's name decides, so a file stays on its side when others come and go. A lone file is cut in two.
    """
    if len(sources) == 1:
        size = sources[0].path.stat().st_size
        cut = size - size // held_out
        return [Piece(sources[0].path, 0, cut)], [Piece(sources[0].path, cut, size)]
    hashes = [
        int.from_bytes(hashlib.blake2b(source.name.encode(), digest_size=8).digest(), "little") for source in sources
    ]
    chosen = {index for index, number in enumerate(hashes) if number % held_out == 0}
    if not 0 < len(chosen) < len(sources):  # few files: take the one that a lower hash would have chosen
        chosen = {hashes.index(min(hashes))}
    pieces = [Piece(source.path, 0, source.path.stat().st_size) for source in sources]
    return (
        [piece for index, piece in enumerate(pieces) if index not in chosen],
        [piece for index, piece in enumerate(pieces) if index in chosen],
    )


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class _Manifest:
    """What stands beside the tokens in the cache: the length of each part, and the sha256 of both."""

    train: int
    held_out: int
    sha256: str

    @classmethod
    def read(cls, path: Path, tokens: Path) -> _Manifest | None:
        """The manifest of a complete cache entry, otherwise None."""
        try:
            manifest = cls(**json.loads(path.read_text()))
            whole = tokens.stat().st_size == manifest.train + manifest.held_out
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return manifest if whole else None


def _write(folder: Path, name: str, train: list[Piece], held_out: list[Piece]) -> _Manifest:
    """Build a cache entry. Whoever builds the same at the same time writes the same, and each file appears complete."""
    digest = hashlib.sha256()
    with _appearing(folder / f"{name}.u8") as file:
        lengths = [sum(_copy(piece, file, digest) for piece in part) for part in (train, held_out)]
    manifest = _Manifest(lengths[0], lengths[1], digest.hexdigest())
    with _appearing(folder / f"{name}.json") as file:
        file.write(json.dumps(asdict(manifest)).encode())
    return manifest


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears at `path` when it is complete, or not at all."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _copy(piece: Piece, file: BinaryIO, digest: hashlib._Hash) -> int:
    """Append a piece and the separator to `file` and `digest`; how many bytes that were."""
    written = len(SEPARATOR)
    try:
        with piece.path.open("rb") as source:
            source.seek(piece.start)
            while chunk := source.read(min(_CHUNK, piece.stop - source.tell())):
                written += file.write(chunk)
                digest.update(chunk)
    except PermissionError as error:
        raise ValueError(f"data.files: {piece.path} cannot be read: {error.strerror}") from error
    file.write(SEPARATOR)
    digest.update(SEPARATOR)
    return written


def _fingerprint(sources: tuple[Source, ...], held_out: int) -> str:
    """Changes when a file comes, goes, or is written again, and when the split does."""
    lines = [f"held out: 1 in {held_out}, separator {SEPARATOR!r}"]
    for source in sources:
        status = source.path.stat()
        lines.append(f"{source.path} {source.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\n".join(lines).encode(errors="surrogateescape"), digest_size=10).hexdigest()


def _cache_folder(data: DataConfig) -> Path:
    if data.cache:
        return Path(data.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshwright"


def _root(pattern: str) -> Path:
    """The folder that a glob starts from: all before its first part with a wildcard."""
    parts = Path(pattern).parts[:-1]
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:fixed])


def _standard_library() -> list[Source]:
    """Python's own modules: real text that every machine has. Their tests only where little is left without them."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Source] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_TEXT]  # not even looked into: it may be huge
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        found += [Source(path, path.relative_to(root).as_posix()) for path in paths if path.stat().st_size]
    clean = [source for source in found if _NOT_CLEAN.isdisjoint(source.name.split("/"))]
    if not found:
        raise ValueError(f"data.files is empty and {root} holds no Python file; name text files in data.files")
    return clean if sum(source.path.stat().st_size for source in clean) >= _PLENTY else found


def _windows(tokens: Tokens, sequence: int, part: str) -> int:
    """How many windows of `sequence` inputs and their targets there are; raises ValueError if none."""
    windows = (len(tokens) - 1) // sequence
    if windows < 1:
        remedy = f"set model.sequence to at most {len(tokens) - 1}, or " if len(tokens) > 1 else ""
        raise ValueError(
            f"the {part} text has {len(tokens)} tokens, but one window needs model.sequence + 1 = {sequence + 1}; "
            f"{remedy}give more text in data.files"
        )
    return windows
