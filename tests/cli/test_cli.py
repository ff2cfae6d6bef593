"""The command line: what each verb prints, what a mistake looks like, and that torch stays out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwright
import meshwright.cli.train
from meshwright.cli.main import main
from meshwright.cli.outcome import exit_code
from meshwright.comm.launch import Interrupted, RankFailure
from meshwright.comm.start import Start
from meshwright.train.config import Config, config_keys

LAYOUT = "dp2.tp2.pp4/zero1/1f1b/m8"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small run on a little text, all of it below a temporary folder."""
    (tmp_path / "a.txt").write_text("to be or not to be, " * 100)
    path = tmp_path / "run.toml"
    path.write_text(
        f'layout = "dp2"\nsteps = 2\nbatch = 4\nfolder = "{tmp_path}/run"\n'
        f'[model]\nsequence = 16\n[data]\nfiles = ["{tmp_path}/*.txt"]\ncache = "{tmp_path}/cache"\n'
    )
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `launch`, which starts nothing; and no variables of torchrun or SLURM."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(meshwright.cli.train, "launch", lambda *arguments: calls.append(arguments))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["show", LAYOUT], ["show", "--help"], ["train", "--help"], ["sample", "--help"]],
)
def test_what_answers_at_once_leaves_torch_alone(words: list[str]) -> None:
    code = (
        "import sys\nfrom meshwright.cli.main import main\n"
        f"assert main({words!r}) == 0\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_python_m_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{meshwright.__version__}\n")


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(verb in output for verb in ("train", "sample", "show", "verify"))


def test_help_on_train_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    lines = {
        line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")
    }
    assert lines.keys() == {f"--{key.name}" for key in config_keys()}
    assert lines["--model.layers"] == str(Config().model.layers)
    assert lines["--model.tied"] == "true"
    assert lines["--micro_batch"] == "-"


def test_show_draws_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", LAYOUT, "--rank", "6", "--layers", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{LAYOUT}   16 ranks\n")
    assert "program of rank 6" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "dp2.tq2"], 'error: layout "dp2.tq2": "tq2" is not a part of a layout; the nearest is "tp2"'),
        (
            ["show", "dp2", "--layers", "0"],
            "error: --layers 0 leaves the stages empty; the nearest that works is --layers 1",
        ),
        (["show"], 'error: Command "show" parameter LAYOUT requires an argument.'),
        (["shwo", "dp2"], 'error: Unknown command "shwo". Did you mean "show"?'),
        (["show", "dp2", "--rang", "1"], "error: Unknown option: --rang. Did you mean --rank?"),
        (["show", "dp2", "--rank", "one"], "error: Invalid value for --rank"),
        (["verify", "dp2", "--steps", "0"], "error: --steps 0 leaves nothing to compare"),
        (["train", "none.toml"], "error: none.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_a_line_without_a_traceback(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(message)
    assert "Traceback" not in output.err


def test_train_launches_the_ranks_of_the_layout_with_the_configuration(
    file: Path, launched: list[tuple[Any, ...]]
) -> None:
    assert main(["train", str(file), "--layout", "dp2.tp2", "--model.layers=6", "--seed", "-3"]) == 0
    ((entry, config, ranks),) = launched
    assert entry is meshwright.cli.train.run_rank
    assert (config.layout, config.model.layers, config.seed, ranks) == ("dp2.tp2", 6, -3, 4)
    assert len(list((file.parent / "cache").iterdir())) == 2, "the corpus is built before the ranks look for it"


def test_train_names_a_key_that_does_not_exist(
    file: Path, launched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--model.layer", "6"]) == 2
    assert capsys.readouterr().err == "error: command line: there is no key model.layer; the nearest is model.layers\n"
    assert not launched


def test_train_warns_of_what_is_legal_but_costs_something(
    file: Path, launched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--layout", "pp4/m2"]) == 0
    assert "warning: m=2 micro-batches do not fill pp=4 stages" in capsys.readouterr().err
    assert launched


def test_train_finds_too_little_text_before_it_starts_ranks(
    file: Path, launched: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--model.sequence", "4096"]) == 2
    assert "error: the training text has 1901 tokens" in capsys.readouterr().err
    assert not launched


def test_train_under_torchrun_is_one_rank(
    file: Path, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[Start, Config]] = []
    monkeypatch.setattr(meshwright.cli.train, "run_rank", lambda start, config: ran.append((start, config)))
    _pretend_torchrun(monkeypatch, rank=1, ranks=2)
    assert main(["train", str(file)]) == 0
    ((start, config),) = ran
    assert (start.rank, start.ranks, start.rendezvous, config.layout) == (1, 2, "tcp://host-a:29500", "dp2")
    assert not launched


def test_train_under_torchrun_needs_as_many_ranks_as_the_layout(
    file: Path, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend_torchrun(monkeypatch, rank=0, ranks=4)
    assert main(["train", str(file)]) == 2
    assert "= 2 ranks, but there are 4; try dp=4, or start 2 ranks" in capsys.readouterr().err


def _pretend_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    for name, value in {**values, "MASTER_ADDR": "host-a", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


def test_a_failed_rank_is_its_traceback_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RankFailure(3, "Traceback ...\nValueError: no\n")

    assert exit_code(fail) == 1
    assert capsys.readouterr().err == "Traceback ...\nValueError: no\nrank 3 failed; all ranks stopped\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Interrupted(15), 143, "stopped by SIGTERM; all ranks stopped"),
        (Interrupted(2), 130, "stopped by SIGINT; all ranks stopped"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    ],
)
def test_an_interruption_is_a_line_and_the_shells_exit_code(
    error: KeyboardInterrupt, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise error

    assert exit_code(stop) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m meshwright show dp1.pp64/m256 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
