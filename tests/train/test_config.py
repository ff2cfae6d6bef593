"""The configuration: reading, overriding, writing, and what it says about mistakes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.costs.spec import GPTSpec
from meshwright.train.config import Config, ConfigError, DataConfig, OptimizerConfig, config_keys, dump, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An empty configuration file: every key has its default."""
    path = tmp_path / "run.toml"
    path.touch()
    return path


def test_an_empty_file_is_the_defaults(file: Path) -> None:
    assert load(file) == Config()


def test_the_example_runs_all_four_kinds_of_parallelism() -> None:
    assert load(EXAMPLE).layout == "dp2.tp2.pp2/zero1/1f1b/m4"


def test_a_file_sets_keys_and_leaves_the_rest(file: Path) -> None:
    file.write_text('layout = "dp2"\ntimeout = 5\n[model]\nlayers = 2\n[data]\nfiles = ["a.txt", "b/*.txt"]\n')
    expected = Config(layout="dp2", timeout=5.0, model=GPTSpec(layers=2), data=DataConfig(files=("a.txt", "b/*.txt")))
    assert load(file) == expected
    assert isinstance(load(file).timeout, float)


def test_the_command_line_comes_before_the_file_and_the_last_word_before_the_first(file: Path) -> None:
    file.write_text("steps = 7\nseed = 3\n")
    assert load(file, ["--steps", "8", "--steps=9"]) == Config(steps=9, seed=3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.layers", "6"], Config(model=GPTSpec(layers=6))),
        (["--log-every=5"], Config(log_every=5)),
        (["--seed", "-1"], Config(seed=-1)),
        (["--optimizer.learning_rate", "3e-4"], Config(optimizer=OptimizerConfig(learning_rate=3e-4))),
        (["--model.tied", "false", "--model.bias=False"], Config(model=GPTSpec(tied=False, bias=False))),
        (["--model.tied", "--steps", "3"], Config(steps=3)),
        (["--data.files", "a.txt,b.txt"], Config(data=DataConfig(files=("a.txt", "b.txt")))),
        (["--micro_batch", "8", "--layout", "dp2/m2"], Config(micro_batch=8, layout="dp2/m2")),
        (["--micro_batch", "none"], Config()),
        (["--folder=my runs/=1"], Config(folder="my runs/=1")),
        (["--dtype", "float64"], Config(dtype="float64")),
    ],
)
def test_command_line_words_become_the_type_of_their_key(file: Path, words: list[str], expected: Config) -> None:
    assert load(file, words) == expected


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("stepz = 3", "stepz", "steps"),
        ("[model]\nlayer = 3", "model.layer", "model.layers"),
        ("layers = 3", "layers", "model.layers"),
        ("[optimiser]\nclip = 1.0", "optimiser", "optimizer"),
        ("model.optimizer.clip = 1.0", "model.optimizer", "optimizer"),
    ],
)
def test_an_unknown_key_is_named_with_the_file_and_the_nearest_key(
    file: Path, text: str, key: str, nearest: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{file}: there is no key {key}; the nearest is {nearest}"):
        load(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stepz", "3"], "^command line: there is no key stepz; the nearest is steps$"),
        (["--model.layer=3"], "^command line: there is no key model.layer; the nearest is model.layers$"),
        (["--model", "3"], "^command line: model is a table; name one of its keys, such as model.layers$"),
        (["steps=3"], '^command line: "steps=3" belongs to no key; write --key value$'),
        (["--steps"], "^command line: --steps has no value; write --steps VALUE$"),
        (["--steps", "--seed", "3"], "--steps has no value"),
        (["--steps", "many"], '^command line: steps is "many"; it must be a whole number$'),
        (["--steps", "3.5"], "steps is .* whole number"),
        (["--model.tied", "yes"], '^command line: model.tied is "yes"; it must be true or false$'),
        (["--timeout", "nan"], "^command line: timeout is nan; it must be a finite number$"),
        (["--dtype", "int8"], "dtype is .* must be float32, float64, bfloat16 or float16"),
        (["--model.heads", "5"], "^command line: model.heads=5 does not divide hidden=128; try heads=4 or 8$"),
        (["--data.held_out", "1"], "^command line: data.held_out=1 .* works is held_out=2$"),
        (["--optimizer.beta2", "1"], "optimizer.beta2=1.0 must be between 0 and 1"),
        (["--optimizer.learning_rate", "0"], "optimizer.learning_rate=0.0 must be above 0"),
        (["--batch", "0"], "^command line: batch=0 must be at least 1"),
        (["--meter", "-1"], "^command line: meter=-1 is not a step; meter=0 is none"),
        (["--trace=-3"], "^command line: trace=-3 is not a step"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(file: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(file, words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = true", "steps is true; it must be a whole number"),
        ("steps = 3.0", "steps is 3.0; it must be a whole number"),
        ('timeout = "long"', 'timeout is "long"; it must be a number'),
        ("folder = 3", "folder is 3; it must be a word in quotes"),
        ('data.files = "a.txt"', 'data.files is "a.txt"; it must be a list of words'),
        ("data.files = [1]", r"data.files is \[1\]; it must be a list of words"),
        ("model = 3", r"model is a table; write \[model\] and its keys below it"),
        ("layout = {dp = 2}", 'layout is {"dp": 2}; it must be a word in quotes'),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{file}: {message}"):
        load(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load(tmp_path / "none.toml")


def test_a_value_that_the_record_refuses_names_the_file_it_came_from(file: Path) -> None:
    file.write_text("[model]\nhidden = 30\n")
    with pytest.raises(ConfigError, match=rf"^{file}: model\.heads=4 does not divide hidden=30; try"):
        load(file)


def test_every_contradiction_is_shown_at_once(file: Path) -> None:
    file.write_text('layout = "tp3.pp9/m8"\nbatch = 256\nmicro_batch = 4\n[model]\nvocabulary = 100\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    text = str(caught.value)
    assert "tp=3 does not divide 4 heads; try tp=2 or 4" in text
    assert "pp=9 stages are more than 6 layers" in text
    assert "256 != 4 x 8 x 1 (micro_batch x m x dp); set batch = 32, or m64" in text
    assert "model.vocabulary=100" in text


def test_a_layout_that_cannot_be_read_is_named_with_the_nearest(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'with --layout dq2: .*\n.*"dq2" is not a part of a layout; the nearest is "dp2"'
    ):
        load(file, ["--layout", "dq2"])


@pytest.mark.parametrize(
    ("batch", "micro_batch", "layout", "remedy"),
    [
        (256, 4, "dp1/m8", "256 != 4 x 8 x 1 (micro_batch x m x dp); set batch = 32, or m64, or micro_batch = 32"),
        (30, 4, "dp2/m4", "30 != 4 x 4 x 2 (micro_batch x m x dp); set batch = 32"),
        (48, 4, "dp2/m4", "48 != 4 x 4 x 2 (micro_batch x m x dp); set batch = 32, or m6, or micro_batch = 6"),
    ],
)
def test_the_batch_equation_is_shown_with_all_terms_and_what_would_fix_it(
    file: Path, batch: int, micro_batch: int, layout: str, remedy: str
) -> None:
    """DeepSpeed reported `256 != 4*8*1` without saying what the terms were or which to change."""
    file.write_text(f'batch = {batch}\nmicro_batch = {micro_batch}\nlayout = "{layout}"\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).endswith(f"- {remedy}")


def test_the_remedies_of_the_batch_equation_work(file: Path) -> None:
    file.write_text("batch = 48\nmicro_batch = 4\n")
    for words in (["--batch=32", "--layout=dp2/m4"], ["--layout=dp2/m6"], ["--layout=dp2/m4", "--micro_batch=6"]):
        load(file, words)


WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
CONFIGS = st.builds(
    Config,
    layout=st.sampled_from(["dp1", "dp2.tp2.pp2/zero1/1f1b/m4"]),
    steps=st.integers(1, 10**12),
    seed=st.integers(-(2**62), 2**62),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    folder=WORDS,
    timeout=st.floats(1e-300, 1e300),
    label_smoothing=st.floats(0, 0.999),
    model=st.builds(GPTSpec, layers=st.integers(1, 99), tied=st.booleans(), dropout=st.floats(0, 0.999)),
    data=st.builds(DataConfig, files=st.lists(WORDS).map(tuple), held_out=st.integers(2, 99), cache=st.none() | WORDS),
    optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(1e-300, 1e300), clip=st.floats(0, 1e300)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(config=CONFIGS)
def test_what_is_written_reads_back_equal(tmp_path: Path, config: Config) -> None:
    config = replace(config, model=replace(config.model, layers=max(4, config.model.layers)))
    path = tmp_path / "config.toml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load(path) == config


def test_every_key_says_what_it_is_for() -> None:
    assert all(key.about for key in config_keys())


def test_the_configuration_never_imports_torch() -> None:
    code = "import sys, meshwright.train.config, meshwright.train.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
