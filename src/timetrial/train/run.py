"""One run from configuration to report: put the parts together, train, write what is left behind."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from timetrial.config import RunConfig, dumps
from timetrial.data.source import Source, open_source
from timetrial.errors import RunFailed, UserError
from timetrial.models import lora
from timetrial.optim import adamw
from timetrial.parallel import cuda, parallelize
from timetrial.report import html
from timetrial.results import summary
from timetrial.results.mllog import ResultLog
from timetrial.train import process as processes
from timetrial.train import takeup, threads
from timetrial.train.base import check_init, initial_weights
from timetrial.train.build import InitialValues, empty_model
from timetrial.train.checkpoint import Checkpointer, Restored
from timetrial.train.display import Display
from timetrial.train.durable import write_atomic
from timetrial.train.environment import record
from timetrial.train.export import save_model, whole_model
from timetrial.train.launch import TIMEOUT_S
from timetrial.train.loop import Trainer
from timetrial.train.peak import matmul_flops_per_s
from timetrial.train.process import Process, lost_peer
from timetrial.train.rundir import RunDir, create, discard, refuse_finished, reopen
from timetrial.train.state import load_state
from timetrial.train.step import make_step


def train_run(
    config: RunConfig,
    out: Path,
    resume: bool,
    command: str,
    export: Path | None = None,
    quiet: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Train `config` into the directory `out`; the content of result.json.

    `export` also writes the trained weights there; `timeout_s` is how long one rank may keep the others
    waiting. Runs on every rank of the job; a job that a launcher has started again takes up the run in `out`
    by itself. Raises UserError before anything is written when the configuration cannot run, RunFailed when
    training breaks, SystemExit(1) on ranks where another one says why.
    """
    process = processes.start(timeout_s)
    state = "failed"
    try:
        if export is None and processes.started_again(process):
            start = takeup.look(config, out)
            config, resume = start.config, start.resume
            if start.result is not None:
                state = "ended"
                return start.result if process.main else {"status": start.result["status"]}
        result = _train(config, out, resume, command, export, quiet, process)
        if export is None:
            processes.on_any(process, False)  # while there are watchdogs: one that hangs from here on waits for none
        state = "ended"
        return result
    except Exception as error:
        if process.watchdog is not None and lost_peer(error):
            state = "lost"
            raise processes.last_words(process.watchdog) from error
        raise
    finally:
        if export is None:  # a base is trained inside the run that needs it
            processes.stop(process, state)


def _train(
    config: RunConfig, out: Path, resume: bool, command: str, export: Path | None, quiet: bool, process: Process
) -> dict[str, Any]:
    config = threads.settle(config, process)
    cuda.check(config.plan, process.device)
    check_init(config)
    source = open_source(config.data)
    check_fit(config, source)
    weights = initial_weights(config)  # may train a base, with threads of its own
    torch.set_num_threads(config.threads or 1)
    run = _directory(config, out, resume, process)
    try:
        return _run(config, run, resume, command, export, quiet, process, source, weights)
    except UserError:
        if process.main and not resume:
            discard(run)
        raise


def _run(
    config: RunConfig,
    run: RunDir,
    resume: bool,
    command: str,
    export: Path | None,
    quiet: bool,
    process: Process,
    source: Source,
    weights: Path | None,
) -> dict[str, Any]:
    """Build, restore and train; what result.json holds, which other ranks than 0 do not write."""
    with ExitStack() as open_until_the_end:
        log = ResultLog(run.log, enabled=process.main and not resume)
        open_until_the_end.callback(log.close)
        log.init_start(config)
        peak = _peak(config, process)
        engine = parallelize.build(config, empty_model(config), InitialValues(config, weights), process.device)
        optimizer = adamw.build(engine.parameters_named(), config.optim, fused=True, capturable=config.plan.graph)
        checkpoints = open_until_the_end.enter_context(Checkpointer(run.checkpoints, keep=config.keep_checkpoints))
        restored = None
        if resume:
            restored = load_state(checkpoints, engine, optimizer, trainable_only=config.lora is not None)
            _take_up(config, run, restored, process)
            log = ResultLog(run.log, enabled=process.main, offset=restored.extra["offsets"]["log"] if restored else 0)
            open_until_the_end.callback(log.close)
            log.init_start(config)  # does nothing where the log goes on
        display = Display(config, total_steps(config), silent=quiet or not process.main)
        open_until_the_end.callback(display.close)
        _announce(restored, resume, display)
        log.hyperparameters(config, train_samples=len(source.train), world_size=process.world_size)
        if process.main:
            write_atomic(run.environment, json.dumps(record(process.world_size, command), indent=2) + "\n")
        make = make_step(config, engine, optimizer)
        trainer = Trainer(
            config, run, process, engine, optimizer, make, source, checkpoints, restored, log, display, peak
        )
        if process.watchdog is not None:
            process.watchdog.step = lambda: trainer.progress.step + 1
        status = trainer.train()
        if config.lora is not None or export is not None:
            model = whole_model(config, engine)
            if model is not None and config.lora is not None:
                lora.save_adapters(model, run.adapters)
            if model is not None and export is not None:
                save_model(config, model, export)
    # last, so that a run with a result lacks nothing
    return _result(config, run, trainer, status, peak, command) if process.main else {"status": status}


def _take_up(config: RunConfig, run: RunDir, restored: Restored | None, process: Process) -> None:
    """What a resumed run replaces, once it is sure that it can go on."""
    ended = run.result.exists()  # a run killed between its last checkpoint and its result has that yet to write
    if restored and ended and config.max_steps is not None and restored.step >= config.max_steps:
        raise UserError(
            f"--resume: {run.path} is at step {restored.step:,} and was to stop there; give a higher --max-steps"
        )
    if process.main:
        write_atomic(run.config, dumps(config))  # its plan may be another now
        for outdated in (run.result, run.report):
            outdated.unlink(missing_ok=True)


def _announce(restored: Restored | None, resume: bool, display: Display) -> None:
    for message in restored.skipped if restored else ():
        display.warn(message)
    if restored:
        display.say(f"resuming at step {restored.step:,} from {restored.path}")
    elif resume:
        display.say("no checkpoint yet: starting at step 0")


def run_and_report(config: RunConfig, out: Path, resume: bool, command: str, timeout_s: float = TIMEOUT_S) -> None:
    """`train_run`, then on rank 0 the page and the table. Raises RunFailed when the target was missed."""
    result = train_run(config, out, resume, command, timeout_s=timeout_s)
    if "workload" not in result:
        return
    run = RunDir(out)
    page = html.write(out)
    paths = {"report": page, "result log": run.log, "run": run.path}
    if config.lora is not None:
        paths["adapters"] = run.adapters
    print(summary.table(result, paths))
    if result["status"] == "aborted":
        goal = f"{config.evaluation.metric} {config.evaluation.target:g}"
        raise RunFailed(f"target {goal} not reached in {result['samples']:,} samples; see {page}")


def total_steps(config: RunConfig) -> int:
    """Steps after which the run ends at the latest."""
    steps = -(-config.evaluation.max_samples // config.plan.gbs)
    return min(steps, config.max_steps) if config.max_steps is not None else steps


def check_fit(config: RunConfig, source: Source) -> None:
    """Refuse a model and data that do not belong together."""
    if source.vocab_size > config.model.vocab_size:
        raise UserError(
            f"data {config.data.source}: its tokenizer has {source.vocab_size:,} ids, the model "
            f"{config.model.vocab_size:,}; set model.vocab_size to at least {source.vocab_size}"
        )
    if len(source.heldout) < config.evaluation.samples:
        raise UserError(
            f"data {config.data.source}: {len(source.heldout):,} held-out samples of {config.data.seq_len} tokens, "
            f"evaluation asks for {config.evaluation.samples:,}; set evaluation.samples or data.seq_len lower"
        )
    if not len(source.train):
        raise UserError(f"data {config.data.source}: no training sample of {config.data.seq_len} tokens")


def _directory(config: RunConfig, out: Path, resume: bool, process: Process) -> RunDir:
    """The run's directory, made by rank 0; all ranks wait for it."""
    run = RunDir(out)
    if process.main:
        run = reopen(out)[0] if resume else create(out, config)
        if resume:
            refuse_finished(run)
    if process.world_size > 1:
        torch.distributed.barrier()
    return run


def _peak(config: RunConfig, process: Process) -> float | None:
    """FLOP/s of all ranks together: all measure at the same time, since they will also compute so."""
    dtype = torch.bfloat16 if process.device.type == "cuda" and config.plan.precision == "bf16" else torch.float32
    rate = matmul_flops_per_s(process.device, dtype, torch.get_num_threads())
    if process.world_size == 1:
        return rate
    total = torch.tensor([rate], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


def _result(
    config: RunConfig, run: RunDir, trainer: Trainer, status: str, peak: float | None, command: str
) -> dict[str, Any]:
    """Write result.json; its content."""
    metrics, evaluations = summary.read_lines(run.metrics), summary.read_lines(run.evaluations)
    progress = trainer.progress
    result = {
        **summary.summarize(config, metrics, evaluations, status),
        "matmul_flops_per_s": peak,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(progress.started_ms / 1000)),
        "resumed": progress.resumed,
        "command": command,
    }
    write_atomic(run.result, json.dumps(result, indent=2) + "\n")
    return result
