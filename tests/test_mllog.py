"""The result log: what stands in it, what the official checker says to it, and what happens when it breaks."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from timetrial.config import Plan, RunConfig, Submission, override, replace
from timetrial.errors import RunFailed, UserError
from timetrial.results import compliance
from timetrial.results.mllog import ResultLog
from timetrial.workloads.workload import find, resolve

OFFICIAL = [
    (name, round_) for name in ("llama31_8b", "llama31_405b", "llama2_70b_lora") for round_ in find(name).rounds
]
NEW_IN_61 = (
    "lowest_numerical_precision_in_linear",
    "lowest_numerical_precision_in_attn",
    "lowest_numerical_precision_in_comm",
    "tensor_parallelism",
    "pipeline_parallelism",
    "context_parallelism",
    "expert_parallelism",
    "micro_batch_size",
    "config_filename",
)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def write_run(log: ResultLog, config: RunConfig, values: list[float] | None = None) -> None:
    """The events of a run that evaluates at its interval until the last of `values`."""
    values = values or [config.evaluation.target * 1.2, config.evaluation.target]
    every = config.evaluation.every_samples
    log.init_start(config)
    log.hyperparameters(config, train_samples=1_574_207, world_size=1)
    log.init_stop()
    log.run_start()
    log.block_start(0)
    for index, value in enumerate(values):
        samples = (config.evaluation.skip_first + index + 1) * every
        log.tracked_stats(samples, train_loss=value + 0.1, throughput=12.5)
        log.block_stop(samples)
        log.eval_start(samples)
        log.eval_accuracy(value, samples)
        log.eval_stop(samples)
        if index + 1 < len(values):
            log.block_start(samples)
    log.run_stop(samples, "success" if config.evaluation.reached(values[-1]) else "aborted")


def run_log(path: Path, config: RunConfig, values: list[float] | None = None) -> Path:
    with ResultLog(path) as log:
        write_run(log, config, values)
    return path


def edit(path: Path, key: str, value: Any = None, drop: bool = False) -> Path:
    """A copy of a log with the first event of `key` changed or left out."""
    lines, done = [], False
    for line in path.read_text().splitlines():
        event = json.loads(line.removeprefix(":::MLLOG "))
        if event["key"] == key and not done:
            done = True
            if drop:
                continue
            line = ":::MLLOG " + json.dumps({**event, "value": value})
        lines.append(line)
    assert done, f"no {key} in the log"
    out = path.with_name(f"edited_{path.name}")
    out.write_text("\n".join(lines) + "\n")
    return out


# ---- the official checker ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "round_"), OFFICIAL)
def test_official_values_pass_the_checker_of_their_round(tmp_path: Path, name: str, round_: str) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve(name, "official", round_))
    assert compliance.check(log, compliance.ruleset_of(round_)) == compliance.Verdict(
        compliance.ruleset_of(round_), True, ()
    )


def test_official_checker_called_by_hand_agrees(tmp_path: Path) -> None:
    good = run_log(tmp_path / "result_0.txt", resolve("llama31_8b", "official", "v6.1"))
    bad = edit(good, "opt_adamw_epsilon", 1e-8)
    for path, status in ((good, 0), (bad, 1)):
        command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training"]
        done = subprocess.run([*command, "--ruleset", "6.1.0", str(path)], cwd=tmp_path, capture_output=True)
        assert done.returncode == status
        assert compliance.check(path, "6.1.0").passed == (status == 0)


def test_reference_convergence_checker_reads_the_log(tmp_path: Path) -> None:
    reader = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
    config = resolve("llama31_8b", "official", "v6.0", 32)
    log = run_log(tmp_path / "result_0.txt", config, [3.5, 3.4, 3.29])
    not_converged, samples, batch, benchmark = reader.read_submission_file(str(log), "6.0.0", False)
    assert (not_converged, samples, batch, benchmark) == (0, 3 * 12_288, 32, "llama31_8b")


@pytest.mark.parametrize(
    ("name", "round_", "key", "value"),
    [
        ("llama31_8b", "v5.1", "max_sequence_length", 4096),
        ("llama31_8b", "v6.0", "opt_learning_rate_decay_steps", 1_200_000),
        ("llama31_8b", "v6.1", "tensor_parallelism", 0),
        ("llama31_405b", "v6.0", "opt_base_learning_rate", 8.1e-5),
        ("llama31_405b", "v5.1", "init_checkpoint_step", 7),
        ("llama2_70b_lora", "v6.0", "lora_rank", 8),
    ],
)
def test_value_out_of_rule_fails(tmp_path: Path, name: str, round_: str, key: str, value: Any) -> None:
    log = edit(run_log(tmp_path / "result_0.txt", resolve(name, "official", round_)), key, value)
    verdict = compliance.check(log, compliance.ruleset_of(round_))
    assert not verdict.passed
    assert any(message.startswith(f"CHECK for '{key}' failed") for message in verdict.messages)


@pytest.mark.parametrize(
    ("name", "round_", "key"),
    [
        ("llama31_8b", "v5.1", "opt_adamw_weight_decay"),
        ("llama31_8b", "v6.0", "submission_org"),
        ("llama31_405b", "v6.0", "opt_gradient_clip_norm"),
        ("llama2_70b_lora", "v6.1", "lora_alpha"),
        *(("llama2_70b_lora", "v6.1", key) for key in NEW_IN_61[::4]),
    ],
)
def test_missing_key_fails(tmp_path: Path, name: str, round_: str, key: str) -> None:
    log = edit(run_log(tmp_path / "result_0.txt", resolve(name, "official", round_)), key, drop=True)
    verdict = compliance.check(log, compliance.ruleset_of(round_))
    assert not verdict.passed
    assert f"Required EXACTLY_ONE occurrence of '{key}' but found 0" in verdict.messages


def test_run_that_missed_its_target_fails(tmp_path: Path) -> None:
    config = resolve("llama31_8b", "official", "v6.0")
    log = run_log(tmp_path / "result_0.txt", config, [3.5, 3.31])
    assert events(log)[-1]["metadata"]["status"] == "aborted"
    verdict = compliance.check(log, "6.0.0")
    assert not verdict.passed
    assert any("Failed checks for eval_accuracy" in message for message in verdict.messages)


@pytest.mark.parametrize("gbs", [1984, 3520])
def test_405b_batch_sizes_that_no_float_can_pass(tmp_path: Path, gbs: int) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve("llama31_405b", "official", "v6.0", gbs))
    verdict = compliance.check(log, "6.0.0")
    assert not verdict.passed
    assert [m.split(" failed")[0] for m in verdict.messages] == ["CHECK for 'opt_base_learning_rate'"]


def test_benchmark_that_the_ruleset_lacks_is_named(tmp_path: Path) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve("llama31_405b", "official", "v6.0"))
    verdict = compliance.check(log, "6.1.0")
    assert not verdict.passed
    assert verdict.messages[0].startswith("llama31_405b is no benchmark of ruleset 6.1.0; it has deepseekv3_671b")


@pytest.mark.parametrize("name", ["llama31_8b", "llama2_70b_lora"])
@pytest.mark.parametrize("ruleset", ["5.1.0", "6.0.0", "6.1.0"])
def test_mini_run_passes_no_ruleset_and_says_what_it_is(tmp_path: Path, name: str, ruleset: str) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve(name, "mini"))
    values = {event["key"]: event["value"] for event in events(log)}
    assert values["submission_benchmark"] == f"{name}_mini"
    assert values["notice"] == "mini preset: not an MLPerf result"
    verdict = compliance.check(log, ruleset)
    assert not verdict.passed
    assert verdict.messages[0].startswith(f"{name}_mini is no benchmark of ruleset {ruleset}")


def test_crash_of_the_checker_is_no_verdict_of_its_own(tmp_path: Path) -> None:
    log = run_log(tmp_path / "result_0.txt", resolve("llama31_8b", "official", "v6.0"))
    verdict = compliance.check(edit(log, "eval_accuracy", "low"), "6.0.0")
    assert not verdict.passed
    assert verdict.messages[-1].startswith("checker crashed: TypeError")


def test_files_and_rulesets_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the result log"):
        compliance.check(tmp_path / "none.txt", "6.0.0")
    with pytest.raises(UserError, match=r"unknown ruleset '6\.2\.0'; there are 5\.0\.0"):
        compliance.check(run_log(tmp_path / "a.txt", resolve("llama31_8b", "official")), "6.2.0")
    with pytest.raises(UserError, match=r"round v4\.1 has no ruleset here"):
        compliance.ruleset_of("v4.1")


# ---- deviations from the definition --------------------------------------------------------------


def test_official_presets_deviate_in_nothing() -> None:
    for name, round_ in OFFICIAL:
        config = resolve(name, "official", round_)
        moved = replace(config, plan=replace(config.plan, tp=8, mbs=2), seed=7)
        assert compliance.deviations(moved) == []


def test_deviations_are_named_and_told_in_the_log(tmp_path: Path) -> None:
    config = override(resolve("llama31_8b", "official"), "model.dim", "128")
    config = override(config, "optim.beta2", "0.99")
    config = override(config, "optim.base_lr", "5e-4")  # free in the rules
    config = override(config, "data.path", "somewhere")
    assert compliance.deviations(config) == ["model.dim", "optim.beta2"]
    log = run_log(tmp_path / "result_0.txt", config)
    told = [event["value"] for event in events(log) if event["key"] == "notice"]
    reasons = "changed model.dim, optim.beta2, data that cannot be read"
    assert told == [f"official preset with {reasons}: not an MLPerf result"]


# ---- the file ------------------------------------------------------------------------------------


def test_events_carry_the_time_and_place_of_the_call(tmp_path: Path) -> None:
    with ResultLog(tmp_path / "log.txt") as log:
        log._official = SlowLogger(log._official)
        before = int(time.time() * 1e3)
        log.block_start(0)
        log.block_stop(16)
        log.eval_accuracy(4.5, 16)
        after = int(time.time() * 1e3)
    found = events(tmp_path / "log.txt")
    assert [event["event_type"] for event in found] == ["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]
    assert all(before <= event["time_ms"] <= after for event in found)
    assert {event["metadata"]["file"] for event in found} == {"test_mllog.py"}
    first = test_events_carry_the_time_and_place_of_the_call.__code__.co_firstlineno
    assert [event["metadata"]["lineno"] - first for event in found] == [4, 5, 6]


class SlowLogger:
    """The official logger, late by more than a call may take."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        time.sleep(0.05)
        return getattr(self.inner, name)


def test_files_of_the_package_are_named_from_the_package_on(tmp_path: Path) -> None:
    from timetrial.results import mllog

    assert mllog._short(mllog.__file__) == "timetrial/results/mllog.py"


def test_nothing_is_printed_and_no_logger_of_the_process_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level, set(logging.Logger.manager.loggerDict)
    run_log(tmp_path / "log.txt", resolve("llama31_8b", "official"))
    assert (list(root.handlers), root.level, set(logging.Logger.manager.loggerDict)) == before
    assert capfd.readouterr() == ("", "")


def test_disabled_log_does_nothing(tmp_path: Path) -> None:
    threads = threading.active_count()
    with ResultLog(tmp_path / "log.txt", enabled=False) as log:
        write_run(log, resolve("llama31_8b", "official"))
        assert threading.active_count() == threads
        assert log.offset() == 0
    assert not list(tmp_path.iterdir())


def test_who_submits_stands_in_the_log(tmp_path: Path) -> None:
    config = replace(resolve("llama31_8b", "official"), submission=Submission("lab", "two cores", "open"))
    values = {event["key"]: event["value"] for event in events(run_log(tmp_path / "log.txt", config))}
    assert (values["submission_org"], values["submission_platform"]) == ("lab", "two cores")
    assert values["submission_division"] == "open"
    assert values["cache_clear"] is False


def test_plan_stands_in_the_log(tmp_path: Path) -> None:
    plan = Plan(tp=2, pp=4, cp=1, dp=2, mbs=1, gbs=32, precision="bf16")
    config = replace(resolve("llama31_8b", "official", "v6.1"), plan=plan)
    values = {event["key"]: event["value"] for event in events(run_log(tmp_path / "log.txt", config))}
    assert [values[key] for key in NEW_IN_61] == ["bfloat16"] * 3 + [2, 4, 1, 1, 1, "config.json"]
    assert values["gradient_accumulation_steps"] == 16


def test_resumed_log_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    config = resolve("llama31_8b", "official", "v6.0")
    path = tmp_path / "log.txt"
    with ResultLog(path) as log:
        write_run(log, config, [3.6])
        offset = log.offset()
        kept = path.read_bytes()
        assert offset == len(kept)
        log.block_start(1)
        log.eval_accuracy(9.9, 1)
    assert path.stat().st_size > offset
    with ResultLog(path, offset=offset) as log:
        assert log.resumed
        log.init_start(config)
        log.hyperparameters(config, train_samples=1)
        log.init_stop()
        log.run_start()
        log.block_start(2)
        assert log.offset() > offset
    assert path.read_bytes().startswith(kept)
    assert [event["key"] for event in events(path)].count("init_start") == 1
    assert events(path)[-1]["metadata"]["samples_count"] == 2
    assert not any(event["value"] == 9.9 for event in events(path))


def test_new_log_replaces_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("old\n" * 1000)
    with ResultLog(path) as log:
        log.block_start(0)
    assert len(events(path)) == 1


def test_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("short\n")
    with pytest.raises(UserError, match="has 6 bytes, its checkpoint recorded 100"):
        ResultLog(tmp_path / "log.txt", offset=100)
    assert (tmp_path / "log.txt").read_text() == "short\n"


def test_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot write the result log .*No such file or directory; choose another --out"
    ):
        ResultLog(tmp_path / "no" / "log.txt")


class FullDisk:
    """A file that takes `room` bytes and no more, as a disk does."""

    def __init__(self, inner: Any, room: int) -> None:
        self.inner, self.room = inner, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.inner.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def log_until_told(log: ResultLog) -> None:
    """Events come back at once; the failure shows in one of the next."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        log.block_stop(10)
        time.sleep(0.001)


@pytest.mark.parametrize("ask", ["offset", "close", "event"])
def test_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path: Path, ask: str) -> None:
    path = tmp_path / "log.txt"
    log = ResultLog(path)
    log._file = FullDisk(log._file, room=500)  # type: ignore[assignment]
    for samples in range(10):
        log.block_start(samples)
    call = {"offset": log.offset, "close": log.close, "event": lambda: log_until_told(log)}[ask]
    with pytest.raises(RunFailed, match=r"cannot write the result log .*No space left on device"):
        call()
    if ask != "close":
        with pytest.raises(RunFailed):
            log.close()
    whole = events(path)
    assert 0 < len(whole) < 10
    assert [event["metadata"]["samples_count"] for event in whole] == list(range(len(whole)))


def test_value_that_json_cannot_hold_ends_the_run(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log.txt")
    log.tracked_stats(0, loss=object())  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="Failed to encode"):
        log.close()


def test_events_of_many_threads_all_arrive(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with ResultLog(path) as log:

        def fifty() -> None:
            for samples in range(50):
                log.block_start(samples)

        threads = [threading.Thread(target=fifty) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events(path)) == 200


def test_second_close_is_harmless_and_late_events_are_refused(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log.txt")
    log.close()
    log.close()
    with pytest.raises(RuntimeError, match="block_start after the result log was closed"):
        log.block_start(0)


def test_shrunken_model_with_official_hyperparameters_passes(tmp_path: Path) -> None:
    """The checker knows no shapes; the log says itself that the definition was changed."""
    config = resolve("llama31_8b", "official", "v6.1")
    small = dataclasses.replace(config.model, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    log = run_log(tmp_path / "result_0.txt", replace(config, model=small))
    assert compliance.check(log, "6.1.0").passed
    assert any(event["key"] == "notice" for event in events(log))
