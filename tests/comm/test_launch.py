"""Starting the ranks of one machine, and ending them: whatever happens, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import launch_entries
import pytest

import meshwright
from meshwright.comm.launch import RankFailure, first_failure, launch, threads_per_rank
from meshwright.comm.start import Start
from meshwright.comm.worker import Failure

MARK = "MESHWRIGHT_TEST_MARK"

BOOM = Failure(rank=2, when=50, lost_peer=False, text="boom")
LATER = Failure(rank=0, when=51, lost_peer=False, text="later")
LOST = Failure(rank=1, when=40, lost_peer=True, text="lost a peer")


@pytest.mark.parametrize(
    ("ends", "failures", "rank", "text"),
    [
        ({2: 1, 0: 1}, [LATER, BOOM], 2, "boom"),
        ({2: 1, 1: 1}, [LOST, BOOM], 2, "boom"),
        ({1: 1, 2: 1, 0: -signal.SIGABRT}, [LOST, BOOM], 2, "boom"),
        ({0: -signal.SIGTERM, 1: 1, 3: -signal.SIGKILL}, [LOST], 3, "rank 3 was killed by SIGKILL .*memory"),
        ({1: 1, 3: 5}, [LOST], 3, "rank 3 left with exit code 5 and raised nothing"),
        ({0: -signal.SIGTERM, 1: 1}, [LOST], 1, "lost a peer"),
        ({0: -signal.SIGTERM}, [], 0, "rank 0 was killed by SIGTERM"),
        ({1: -signal.SIGSEGV}, [], 1, r"rank 1 was killed by SIGSEGV \(signal 11\)$"),
    ],
)
def test_the_rank_that_failed_first_is_told_from_those_that_lost_it(
    ends: dict[int, int], failures: list[Failure], rank: int, text: str
) -> None:
    failure = first_failure(ends, failures)
    assert failure is not None
    assert failure.rank == rank
    with pytest.raises(RankFailure, match=text):
        raise failure


def test_no_failure_is_none() -> None:
    assert first_failure({}, []) is None


def test_cores_are_shared_out_unless_somebody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = threads_per_rank(1)
    assert cores >= 1
    assert threads_per_rank(2) == max(1, cores // 2)
    assert threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(2) == 3


def test_one_rank_runs_in_this_process() -> None:
    seen = []
    launch(lambda start, argument: seen.append((start.rank, start.ranks, argument)), "argument", 1)
    assert seen == [(0, 1, "argument")]


def test_one_rank_fails_as_many_do() -> None:
    with pytest.raises(RankFailure, match="rank 0 failed") as caught:
        launch(lambda start, argument: [][start.rank], None, 1)
    assert caught.value.rank == 0
    assert caught.value.text.rstrip().endswith("IndexError: list index out of range")
    assert "in _run_here" not in caught.value.text


@pytest.mark.ranks
def test_every_rank_knows_its_place_and_nothing_of_this_process_has_changed(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    environment = dict(os.environ)
    launch(launch_entries.report, tmp_path, 3)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    starts = [Start(**report["start"]) for report in reports]
    (rendezvous,) = {start.rendezvous for start in starts}
    assert rendezvous.startswith("file:///")
    assert starts == [Start(rank, 3, rank, 3, rendezvous, attempt=0, agent_store=False) for rank in range(3)]
    assert len({report["pid"] for report in reports} | {os.getpid()}) == 4
    assert {report["threads"] for report in reports} == {threads_per_rank(3)}
    assert not Path(rendezvous.removeprefix("file://")).parent.exists()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert os.environ == environment


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"ValueError: the cause\n$"),
        ("kill", r"^rank 2 was killed by SIGKILL \(signal 9\)"),
        ("leave", "^rank 2 left with exit code 3 and raised nothing$"),
    ],
)
def test_the_cause_is_reported_and_not_the_ranks_that_waited_for_it(how: str, text: str) -> None:
    with pytest.raises(RankFailure) as caught:
        launch(launch_entries.lose_a_peer, how, 3)
    assert caught.value.rank == 2
    assert re.search(text, caught.value.text), caught.value.text


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_on_a_network(tmp_path: Path) -> None:
    launch(launch_entries.look_for_open_ports, tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"looked-0", "looked-1"}


@dataclass
class Launched:
    """A launcher in a process group of its own; its processes carry a mark, and its temporary files lie in a folder."""

    process: subprocess.Popen[str]
    reports: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def await_ranks(self, count: int) -> None:
        await_(lambda: len(list(self.reports.iterdir())) == count)

    def assert_nothing_is_left(self) -> None:
        await_(lambda: not any(self._processes()))
        await_(lambda: not any(self.temporary.iterdir()))

    def _processes(self) -> Iterator[str]:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    yield path.parent.name
            except OSError:  # it has ended, or is somebody else's
                continue


def await_(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; a time-out of the test ends what never does."""
    while not condition():
        time.sleep(0.02)


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Callable[[str, int], Launched]]:
    """Launch an entry of `launch_entries` by name, in a process of its own."""
    running: list[Launched] = []

    def start(entry: str, ranks: int) -> Launched:
        temporary, reports = tmp_path / "temporary", tmp_path / "reports"
        temporary.mkdir()
        reports.mkdir()
        mark = uuid.uuid4().hex
        paths = [str(Path(path).resolve()) for path in (*meshwright.__path__, launch_entries.__file__)]
        process = subprocess.Popen(
            [sys.executable, launch_entries.__file__, entry, str(reports), str(ranks)],
            env=os.environ
            | {MARK: mark, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(str(Path(p).parent) for p in paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(Launched(process, reports, temporary, mark))
        return running[-1]

    yield start
    for launched in running:
        if launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGKILL)
        launched.process.communicate()


@pytest.mark.ranks
def test_an_exception_stops_all_ranks_and_is_shown_first(start_launcher: Callable[[str, int], Launched]) -> None:
    launched = start_launcher("raise_on_rank_1", 3)
    output, errors = launched.process.communicate()
    assert (launched.process.returncode, output) == (1, "")
    assert errors.startswith("Traceback (most recent call last):\n  File ")
    assert errors.endswith("ValueError: rank 1 does not like this\nrank 1 failed; all ranks stopped\n")
    assert "elastic" not in errors
    launched.assert_nothing_is_left()


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_everything_in_one_line(
    start_launcher: Callable[[str, int], Launched], number: signal.Signals
) -> None:
    launched = start_launcher("wait", 2)
    launched.await_ranks(2)
    os.killpg(launched.process.pid, number)  # a terminal sends Ctrl-C to the whole group
    output, errors = launched.process.communicate()
    assert (output, errors) == ("", f"stopped by {number.name}; all ranks stopped\n")
    assert launched.process.returncode == 128 + number
    launched.assert_nothing_is_left()


@pytest.mark.ranks
def test_nothing_survives_a_killed_launcher(start_launcher: Callable[[str, int], Launched]) -> None:
    launched = start_launcher("wait", 2)
    launched.await_ranks(2)
    launched.process.kill()
    launched.assert_nothing_is_left()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.1, 0.4, 0.8, 1.2])
def test_a_signal_while_ranks_are_being_started_leaves_nothing_either(
    start_launcher: Callable[[str, int], Launched], delay: float
) -> None:
    launched = start_launcher("wait", 4)
    time.sleep(delay)
    os.killpg(launched.process.pid, signal.SIGINT)
    output, errors = launched.process.communicate()
    assert (launched.process.returncode, output) == (130, "")
    assert errors.count("\n") == 1
    launched.assert_nothing_is_left()
