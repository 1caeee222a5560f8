"""The training loop: step, evaluate, stop at the target; everything a run leaves is written here.

One step: wait for samples, forward and backward over the micro batches, clip, learning rate, optimizer.
After the steps at which the rule says so: evaluate the fixed held-out set and stop when the target is
met. The run fails when `max_samples` are used up without that. The clock runs from `run_start`, before
the first sample is read, to `run_stop`, evaluations included (MLPerf Training rules, section 7).

A step is a function of (configuration, weights, step number): samples come from their position, dropout
from a stream named after the step. So a run that was killed and resumed repeats the undisturbed run.
"""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from timetrial.config import RunConfig
from timetrial.data.loader import Loader
from timetrial.data.source import Source
from timetrial.errors import RunFailed
from timetrial.optim.schedule import learning_rate
from timetrial.parallel.engine import Batch, Engine
from timetrial.results.mllog import ResultLog
from timetrial.seeding import stream
from timetrial.train.checkpoint import Checkpointer, Restored
from timetrial.train.clock import StepClock
from timetrial.train.display import Display
from timetrial.train.durable import JsonLines, write_atomic
from timetrial.train.evaluate import evaluate
from timetrial.train.process import Process
from timetrial.train.rundir import RunDir
from timetrial.train.state import run_state
from timetrial.train.step import Step


@dataclass
class Progress:
    """How far the run is; stored in each checkpoint."""

    step: int = 0
    samples: int = 0
    value: float | None = None
    """The last evaluation's quality."""
    started_ms: int = 0
    """When the clock started, milliseconds since 1970."""
    elapsed_s: float = 0.0
    """Seconds of running since then; a pause between stop and resume does not count."""
    resumed: int = 0
    """How often the run was taken up again."""


class Files:
    """The run's growing files, cut back to where `restored` was taken; only rank 0 has them."""

    def __init__(self, run: RunDir, restored: Restored | None) -> None:
        offsets = restored.extra["offsets"] if restored else {"metrics": 0, "evaluations": 0}
        self.metrics = JsonLines(run.metrics, offset=offsets["metrics"])
        self.evaluations = JsonLines(run.evaluations, offset=offsets["evaluations"])

    def sync(self) -> dict[str, int]:
        """Make all lines durable; how long the files are, bytes."""
        return {"metrics": self.metrics.offset(), "evaluations": self.evaluations.offset()}

    def close(self) -> None:
        self.metrics.close()
        self.evaluations.close()


class Trainer:
    """One run of one process. `restored` is the checkpoint that engine and optimizer were filled from."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        process: Process,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        step: Step,
        source: Source,
        checkpoints: Checkpointer,
        restored: Restored | None,
        log: ResultLog,
        display: Display,
        peak_flops_per_s: float | None,
    ) -> None:
        self.config, self.run, self.process = config, run, process
        self.engine, self.optimizer, self.step, self.source = engine, optimizer, step, source
        self.checkpoints, self.log, self.display = checkpoints, log, display
        self.peak_flops_per_s = peak_flops_per_s
        self.progress = Progress(**restored.extra["progress"]) if restored else Progress()
        self.progress.resumed += restored is not None
        self.files = Files(run, restored) if process.main else None
        self.stop_asked = False
        self._began = time.monotonic() - self.progress.elapsed_s

    @property
    def reached(self) -> bool:
        """Whether the last evaluation met the target."""
        return self.progress.value is not None and self.config.evaluation.reached(self.progress.value)

    def train(self) -> str:
        """Run to the end; returns success, aborted (target missed) or stopped (asked to, or max_steps)."""
        config, progress = self.config, self.progress
        if progress.started_ms == 0:
            self.log.init_stop()
            self.log.run_start()
            progress.started_ms = int(time.time() * 1000)
            self._began = time.monotonic()
            self.log.block_start(0)
        loader = Loader(
            self.source.train,
            seed=config.seed,
            gbs=config.plan.gbs,
            mbs=config.plan.mbs,
            dp_rank=self.engine.dp_rank,
            dp_size=self.engine.dp_size,
            start_sample=progress.samples,
        )
        signals = (signal.SIGTERM, signal.SIGINT)
        previous = [signal.signal(number, self._ask_to_stop) for number in signals]
        try:
            status = self._steps(loader)
            self._finish(status)
            return status
        finally:
            for number, handler in zip(signals, previous, strict=True):
                signal.signal(number, handler)
            self.step.close()
            loader.close()
            if self.files:
                self.files.close()
            self.display.close()

    def _steps(self, loader: Loader) -> str:
        config, progress = self.config, self.progress
        clock = StepClock()
        while (status := self._ended()) is None:
            clock.start()
            if config.checkpoint_every and progress.step and progress.step % config.checkpoint_every == 0:
                with clock.phase("checkpoint"):
                    self._save(self._offsets())
            micro_batches = next(loader)
            clock.add("data", loader.wait_s)
            row = self._step(micro_batches, loader, clock)
            before = progress.samples
            progress.step += 1
            progress.samples += config.plan.gbs
            self._record(row, clock)
            self._evaluate_if_due(before)
        return status

    def _ended(self) -> str | None:
        """How the run has ended, or None while it goes on; the same on every rank."""
        config, progress = self.config, self.progress
        if self.reached:
            return "success"
        if progress.samples >= config.evaluation.max_samples:
            return "aborted"
        if config.max_steps is not None and progress.step >= config.max_steps:
            return "stopped"
        self.checkpoints.poll()
        return "stopped" if self._agree_to_stop() else None

    def _step(self, micro_batches: list[Batch], loader: Loader, clock: StepClock) -> dict[str, float]:
        """Forward, backward, clip and update; the step's loss, gradient norm and learning rate."""
        config, number = self.config, self.progress.step
        torch.manual_seed(stream(config.seed, f"step/{number}/{self.engine.stream_name}"))
        lr = learning_rate(config.optim, number)
        made = self.step(micro_batches, lr, clock)
        if not (math.isfinite(made.loss) and math.isfinite(made.grad_norm)):
            self._save_failure(made.loss, made.grad_norm, loader)
        return {"loss": made.loss, "lr": lr, "grad_norm": made.grad_norm}

    def _evaluate_if_due(self, samples_before: int) -> None:
        """Evaluate when this step passed an evaluation point; notes whether the target is met."""
        config, progress = self.config, self.progress
        if not config.evaluation.due(samples_before, progress.samples):
            return
        self.log.block_stop(progress.samples)
        self.log.eval_start(progress.samples)
        began = time.perf_counter()
        value = evaluate(self.engine, self.source.heldout, config)
        seconds = time.perf_counter() - began
        progress.value = value
        self.log.eval_accuracy(value, progress.samples)
        self.log.eval_stop(progress.samples)
        if self.files:
            self.files.evaluations.append(
                {
                    "step": progress.step,
                    "samples": progress.samples,
                    "value": value,
                    "target": config.evaluation.target,
                    "reached": self.reached,
                    "duration_s": seconds,
                    "elapsed_s": self._elapsed_s(),
                }
            )
        self.display.evaluation(progress.samples, value, self.reached, seconds)
        if not math.isfinite(value):
            raise RunFailed(f"step {progress.step}: evaluation gave {value}; start again with a lower optim.base_lr")
        if not self.reached:
            self.log.block_start(progress.samples)

    # ---- writing ---------------------------------------------------------------------------------

    def _record(self, row: dict[str, float], clock: StepClock) -> None:
        """One line of metrics.jsonl and of the display."""
        config, progress = self.config, self.progress
        step_s, phases = clock.stop()
        tokens = config.plan.gbs * config.data.seq_len
        mfu = config.flops_per_step / step_s / self.peak_flops_per_s if self.peak_flops_per_s else None
        self.display.step(progress.step, row["loss"], step_s, tokens, mfu)
        if self.files:
            self.files.metrics.append(
                {
                    "step": progress.step,
                    "loss": row["loss"],
                    "samples": progress.samples,
                    "step_time_s": step_s,
                    "lr": row["lr"],
                    "grad_norm": row["grad_norm"],
                    "tokens_per_s": tokens / step_s,
                    "mfu": mfu,
                    "elapsed_s": self._elapsed_s(),
                    "phases": phases,
                }
            )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _offsets(self) -> dict[str, int]:
        """How long the run's files are now, made durable; a resumed run cuts them back to this."""
        return {**self.files.sync(), "log": self.log.offset()} if self.files else {}

    def _save(self, offsets: dict[str, int]) -> None:
        """Start a checkpoint of this very state; it is written while training goes on."""
        self.progress.elapsed_s = self._elapsed_s()
        extra: dict[str, Any] = {"progress": dict(vars(self.progress)), "offsets": offsets}
        state = run_state(self.engine, self.optimizer, trainable_only=self.config.lora is not None)
        self.checkpoints.save(self.progress.step, state, extra)

    def _save_failure(self, loss: float, norm: float, loader: Loader) -> None:
        """Keep what made the loss break and end the run."""
        step = self.progress.step + 1
        path = self.run.path / f"failure-step-{step}-rank-{self.process.rank}.json"
        indices = [int(i) for i in loader.last_indices]
        record = {"step": step, "loss": str(loss), "grad_norm": str(norm), "sample_indices": indices}
        write_atomic(path, json.dumps(record, indent=2) + "\n")
        raise RunFailed(
            f"step {step}: loss {loss}, gradient norm {norm}; the sample indices are in {path}; "
            "start again with a lower optim.base_lr or another seed"
        )

    def _finish(self, status: str) -> None:
        """Stop the clock of a run that is over, then keep its last state."""
        offsets = self._offsets()  # before run_stop, so that a resumed run can take it back
        over = status != "stopped" or self.progress.step == self.config.max_steps
        if over:
            if not self.reached:
                self.log.block_stop(self.progress.samples)
            self.log.run_stop(self.progress.samples, status)
        if self.config.checkpoint_every or status == "stopped":
            self._save(offsets)
            self.checkpoints.wait()

    # ---- being asked to stop ---------------------------------------------------------------------

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked = True

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop, so that all stop after the same step."""
        if self.process.world_size == 1:
            return self.stop_asked
        flag = torch.tensor([float(self.stop_asked)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())
