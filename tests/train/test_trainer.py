"""A run from its configuration to its weights, small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.comm.connect import Groups, solo
from meshwright.comm.start import Start
from meshwright.costs.spec import GPTSpec
from meshwright.layout.layout import Layout
from meshwright.train.config import Config, DataConfig, OptimizerConfig, load
from meshwright.train.data import Corpus
from meshwright.train.sampling import sample
from meshwright.train.trainer import Trainer, run_rank
from meshwright.train.weights import load_weights
from pool import RankPool

SOLO = Start(0, 1, 0, 1, "file:///dev/null", attempt=0, agent_store=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return Config(
        layout="dp1.tp1.pp1/zero0/1f1b/m2",
        batch=8,
        steps=30,
        folder=str(tmp_path / "run"),
        log_every=10,
        evaluate_every=15,
        evaluation_samples=8,
        model=GPTSpec(layers=1, hidden=32, heads=2, sequence=16, dropout=0.1),
        data=DataConfig(files=(str(text),), cache=str(tmp_path / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=5),
    )


def test_a_run_learns_logs_saves_and_reports(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run_rank(SOLO, config)
    folder = Path(config.folder)
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    evaluations = [record["evaluation_loss"] for record in records if "evaluation_loss" in record]
    assert [record["step"] for record in records if "evaluation_loss" in record] == [0, 15, 30]
    assert evaluations[0] == pytest.approx(5.55, abs=0.2)  # as good as guessing: ln 256
    assert evaluations[-1] < 0.6 * evaluations[0]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [10, 20, 30]
    assert all(record["tokens_per_s"] > 0 and record["memory"] > 0 and record["skipped"] == 0 for record in steps)
    assert load(folder / "config.toml") == config
    printed = capsys.readouterr().out
    assert "step=30 loss=" in printed
    assert "memory per rank" in printed
    (memory,) = json.loads((folder / "memory.json").read_text())
    assert memory["activations"] > 0
    assert memory["peak"] == sum(memory[part] for part in ("parameters", "gradients", "optimizer", "activations"))
    assert "a sample of what it learned:\ndef " in printed


@pytest.mark.parametrize(("meter", "steps", "measured"), [(0, 2, False), (5, 2, True), (1, 1, True)])
def test_the_step_that_the_configuration_names_is_measured_or_the_last_or_none(
    config: Config, capsys: pytest.CaptureFixture[str], meter: int, steps: int, measured: bool
) -> None:
    run_rank(SOLO, replace(config, meter=meter, steps=steps))
    assert ("activations" in capsys.readouterr().out) == measured


def test_a_saved_run_can_be_sampled_and_the_seed_decides(config: Config) -> None:
    run_rank(SOLO, config)
    folder = Path(config.folder)
    text = sample(folder, "the quick", tokens=20)
    assert text.startswith("the quick")
    assert len(text) == len("the quick") + 20
    assert text == sample(folder, "the quick", tokens=20)
    assert sample(folder, "the", tokens=5, temperature=0) == sample(folder, "the", tokens=5, temperature=0, seed=1)
    long = sample(folder, "x" * 40, tokens=3)  # longer than the model has positions
    assert len(long) == 43


def test_a_folder_that_is_no_run_and_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        sample(tmp_path, "x")
    with pytest.raises(ValueError, match="temperature=-1"):
        sample(tmp_path, "x", temperature=-1)


def train(groups: Groups, config: Config) -> dict[str, torch.Tensor]:
    Trainer(config, Layout.parse(config.layout), groups, Corpus.open(config.data)).run()
    return dict(load_weights(Path(config.folder)))


@pytest.mark.parametrize("text", ["dp2.tp2/zero2/m2", "tp2.pp2/m3/recompute-full"])
def test_a_whole_run_gives_the_weights_of_one_process(pool: RankPool, config: Config, text: str) -> None:
    short = replace(config, steps=6, dtype="float64", evaluate_every=100)
    alone = train(solo(), replace(short, folder=f"{config.folder}-one"))
    layout = Layout.parse(text)
    for weights in pool.run(layout.mesh, train, replace(short, layout=text, folder=f"{config.folder}-many")):
        assert weights.keys() == alone.keys()
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("text", ["dp1", "pp2/m4"])
def test_a_traced_step_shows_what_every_rank_did(pool: RankPool, config: Config, text: str) -> None:
    layout = Layout.parse(text)
    pool.run(layout.mesh, train, replace(config, layout=text, steps=2, trace=2))
    events = json.loads((Path(config.folder) / "trace.json").read_text())["traceEvents"]
    for rank in range(layout.ranks):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert sum(name.startswith("B") for name in names) >= layout.micro_batches
        assert names[-1] == "STEP"
    assert not list(Path(config.folder).glob("trace.json.*"))


def test_gpus_that_are_not_there_are_an_error_with_both_numbers(config: Config) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        ValueError, match="1 ranks on this machine need as many GPUs, and there are 0; device=cpu works"
    ):
        run_rank(SOLO, replace(config, device="cuda"))
