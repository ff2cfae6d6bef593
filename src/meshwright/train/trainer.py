"""Trains: what one rank does from start-up to the trained weights. Everything here is told by one `Config`.

connect ─► handshake ─► engine ─► step, step, log, step, evaluate, ... ─► weights, summary, a sample of text
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright.comm.connect import Groups, connect
from meshwright.comm.group import Reduction
from meshwright.comm.start import Start
from meshwright.costs.sheet import parameters, training_flops
from meshwright.engine.build import build
from meshwright.engine.engine import Engine, StepResult
from meshwright.engine.meter import Meter, at_rest
from meshwright.engine.tracer import Tracer
from meshwright.layout.layout import Layout
from meshwright.parallel.precision import Precision
from meshwright.parallel.product import onednn_is_quicker
from meshwright.train import summary
from meshwright.train.batches import evaluation_batches, training_batches
from meshwright.train.config import Config, dump
from meshwright.train.data import Corpus, Sampler, held_out_windows
from meshwright.train.metrics import EvaluationRecord, RunLog, StepRecord, peak_memory
from meshwright.train.optimizer import adamw, learning_rate
from meshwright.train.sampling import CONFIG, sample
from meshwright.train.trace import write_trace
from meshwright.train.weights import save_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_rank(start: Start, config: Config) -> None:
    """Train as the rank that `start` says; returns when the weights are saved. Rank 0 prints."""
    device = _device(config.device, start)
    layout = Layout.parse(config.layout)
    groups = connect(layout.mesh, start, device, config.timeout, config.transport, config.debug)
    corpus = Corpus.open(config.data)
    groups.agree(_statement(config, corpus))
    Trainer(config, layout, groups, corpus).run()


def _device(name: str, start: Start) -> torch.device:
    """The GPU of this local rank, or the CPU.

    Raises:
        ValueError: a GPU was asked for and there are fewer than ranks on this machine.
    """
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count < start.local_ranks):
        return torch.device("cpu")
    if count < start.local_ranks:
        raise ValueError(
            f"{start.local_ranks} ranks on this machine need as many GPUs, and there are {count}; device=cpu works"
        )
    torch.cuda.set_device(start.local_rank)
    return torch.device("cuda", start.local_rank)


def _statement(config: Config, corpus: Corpus) -> dict[str, str]:
    """What every rank must have in common: configuration, model, data and versions."""
    stated = {f"config.{key}": value for key, value in _flat(asdict(config))}
    stated["model parameters"] = str(parameters(config.model))
    stated["data"] = corpus.digest
    stated["meshwright"] = meshwright.__version__
    stated["source"] = _source_digest()
    stated["torch"] = torch.__version__
    stated["python"] = platform.python_version()
    stated["matrix products"] = "oneDNN" if onednn_is_quicker() else "torch's choice"
    return stated


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, repr(value)


def _source_digest() -> str:
    """Of this package's own source: a working copy changed on one machine and not on another is found at start-up."""
    digest = sha256()
    root = Path(meshwright.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Trainer:
    """The loop of one rank."""

    def __init__(self, config: Config, layout: Layout, groups: Groups, corpus: Corpus) -> None:
        self.config = config
        self.layout = layout
        self.groups = groups
        self.run_folder = Path(config.folder)
        self._sampler = Sampler(corpus.train, config.model.sequence, config.seed)
        self._held_out = held_out_windows(corpus.held_out, config.model.sequence, config.evaluation_samples)
        reduce = None if config.reduce_dtype == "same" else DTYPES[config.reduce_dtype]
        self._precision = Precision.of(DTYPES[config.dtype], reduce)
        self.engine: Engine = build(
            config.model,
            layout,
            groups,
            adamw(config.optimizer),
            seed=config.seed,
            dtype=self._precision.compute,
            reduce_dtype=self._precision.reduce,
            clip=config.optimizer.clip or None,
        )
        self._meter = Meter(groups.device)
        self._skipped = 0

    def run(self) -> None:
        """Train all steps, then save and report."""
        with _progress(self.groups.rank, self.config.steps) as advance, self._log() as log:
            self._say(self._heading())
            self._evaluate(log, 0)
            logged_at, logged_step = time.perf_counter(), 0
            for step in range(self.config.steps):
                result = self._step(step)
                advance()
                done = step + 1
                if done % self.config.log_every == 0 or done == self.config.steps:
                    now = time.perf_counter()
                    self._record(log, done, result, (now - logged_at) / (done - logged_step))
                    logged_at, logged_step = now, done
                if done % self.config.evaluate_every == 0 or done == self.config.steps:
                    before = time.perf_counter()
                    self._evaluate(log, done)
                    logged_at += time.perf_counter() - before  # rates are of training alone
        self._finish()

    def _step(self, step: int) -> StepResult:
        config = self.config
        window, data_rank = self._sampler.window, self.groups.data.index
        batches = training_batches(window, config, self.layout, data_rank, step)
        rate = learning_rate(config.optimizer, step, config.steps)
        tracer = Tracer(self.groups.rank, self.groups.device, enabled=step + 1 == config.trace)
        if tracer.enabled:
            self.groups.world.barrier()  # every rank's clock starts here
        batches = [batch.to(self.groups.device) for batch in batches]
        with self._meter if step + 1 == min(config.meter, config.steps) else nullcontext():
            result = self.engine.step(batches, rate, tracer=tracer)
        if tracer.enabled:
            write_trace(self.groups, tracer.timeline(), self.run_folder)
        if result.skipped:
            self._skipped += 1
            self._say(f"step {step + 1}: {result.fault}; step skipped")
        return result

    def _record(self, log: RunLog | None, done: int, result: StepResult, seconds: float) -> None:
        memory = torch.tensor([peak_memory(self.groups.device)], device=self.groups.device)
        self.groups.world.all_reduce(memory, label="peak memory", reduction=Reduction.MAX)
        if log is not None:
            log.write(
                StepRecord(
                    step=done,
                    loss=result.loss,
                    grad_norm=result.gradient_norm,
                    lr=learning_rate(self.config.optimizer, done - 1, self.config.steps),
                    tokens_per_s=result.tokens / seconds,
                    flops_per_s=training_flops(self.config.model) * self.config.batch / seconds,
                    memory=int(memory),
                    skipped=self._skipped,
                )
            )

    def _evaluate(self, log: RunLog | None, done: int) -> None:
        batches = evaluation_batches(self._held_out, self.config.model.sequence, self.layout, self.groups.data.index)
        result = self.engine.evaluate([batch.to(self.groups.device) for batch in batches])
        if log is not None:
            log.write(EvaluationRecord(done, result.loss))

    def _finish(self) -> None:
        config = self.config
        folder = save_weights(self.engine, self.run_folder)
        own = self._meter.footprint(self.engine) if config.meter else at_rest(self.engine)
        measured = summary.all_ranks(self.groups.world, own, self.groups.device)
        if self.groups.rank == 0:
            work = summary.Work(config.model, self.layout, self.engine.stage.cut, self._precision, config.batch)
            summary.write(measured, self.run_folder)
            self._say(f"\nweights: {folder}\n\n{summary.table(work, measured, with_step=bool(config.meter))}")
            self._say(f"\na sample of what it learned:\n{sample(self.run_folder, SAMPLE_PROMPT)}")

    @contextmanager
    def _log(self) -> Iterator[RunLog | None]:
        """Rank 0's log in the run folder, beside the resolved configuration."""
        if self.groups.rank != 0:
            yield None
            return
        self.run_folder.mkdir(parents=True, exist_ok=True)
        (self.run_folder / CONFIG).write_text(dump(self.config))
        log = RunLog(self.run_folder / "log.jsonl", sys.stdout)
        try:
            yield log
        finally:
            log.close()

    def _heading(self) -> str:
        model = self.config.model
        return (
            f"{self.layout} on {self.layout.ranks} ranks ({self.groups.device.type}): "
            f"GPT of {parameters(model):,} parameters, {model.layers} layers, {model.hidden} hidden; "
            f"{self.config.batch} samples of {model.sequence} tokens a step"
        )

    def _say(self, text: str) -> None:
        if self.groups.rank == 0:
            print(text, flush=True)


SAMPLE_PROMPT = "def "


@contextmanager
def _progress(rank: int, steps: int) -> Iterator[Any]:
    """A progress bar for a person at a terminal; nothing anywhere else."""
    if rank != 0 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=steps)
        yield lambda: bar.advance(task)
