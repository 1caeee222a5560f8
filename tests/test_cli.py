"""The command line as a user meets it: real processes, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import timetrial, tiny
from timetrial.train.request import rank_count, resolve


def test_list_names_every_workload_and_its_targets():
    done = timetrial("list")
    assert done.returncode == 0
    for words in ("llama31_8b", "llama31_405b", "llama2_70b_lora", "log perplexity <= 3.3", "0.925", "5.6", "mini"):
        assert words in done.stdout


def test_list_needs_no_torch():
    code = (
        "import sys; from timetrial.cli import app; app(['list'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_list_one_workload_shows_where_each_value_comes_from():
    done = timetrial("list", "llama31_405b")
    assert done.returncode == 0
    assert "optim.base_lr" in done.stdout
    assert "mlcommons/" in done.stdout


def test_list_json_resolves_both_presets():
    records = json.loads(timetrial("list", "--json").stdout)
    by_name = {record["name"]: record for record in records}
    assert by_name["llama31_405b"]["official"]["evaluation"]["target"] == 5.6
    assert by_name["llama31_8b"]["mini"]["model"]["vocab_size"] < 10_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "lama31_8b"), "did you mean llama31_8b"),
        (("train", "llama31_8b", "--preset", "offical"), "did you mean official"),
        (("train", "llama31_8b", "--round", "v4.0"), "v5.1"),
        (("train", "llama31_8b", "--set", "optim.lr=1"), "base_lr"),
        (("train", "llama31_8b", "--set", "optim.base_lr=fast"), "finite number"),
        (("train", "llama31_8b", "--set", "optim=1"), "optim.base_lr"),
        (("train", "llama31_8b", "--set", "optim.base_lr"), "key=value"),
        (("train", "llama31_8b", "--plan", "tq=2"), "tq"),
        (("train", "llama31_8b", "--plan", "tp=3", "--nproc", "2"), "does not divide 2 ranks"),
        (("train", "llama31_8b", "--resume"), "--out"),
        (("train", "llama31_8b", "--max-steps", "0"), "at least 1"),
        (("train", "llama31_8b", "--set", "init.kind=hf"), "init.path"),
        (("train", "llama31_8b", "--set", "data.source=books"), "sotu"),
        (("train", "llama31_8b", "--set", "data.seq_len=100000"), "held-out"),
        (("train", "llama31_8b", "--set", "model.vocab_size=64"), "model.vocab_size"),
        (("train", "llama31_8b", "--preset", "official"), "data"),
        (("train", "llama31_8b", "--set", "preset=official"), "--preset"),
        (("train", "llama31_8b", "--round", "v5.1"), "leave it out"),
        (("train", "llama31_8b", "--data", "nowhere"), "leave --data out"),
        (("report", "nowhere"), "nowhere"),
        (("export", "nowhere", "--out", "there"), "no run"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(words, says, tmp_path):
    done = timetrial(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_out_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = timetrial("train", "llama31_8b", "--out", tmp_path)
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_out_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = timetrial("train", "llama31_8b", "--out", tmp_path / "file" / "run")
    assert done.returncode == 2
    assert "cannot write there" in done.stderr


def test_dry_run_prints_and_starts_nothing(tmp_path):
    done = timetrial("train", "llama31_405b", "--preset", "official", "--dry-run",
                     "--plan", "tp=8,pp=8,cp=2,vp=8,dp=4,gbs=1152,order=tp-cp-dp-pp", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "512" in done.stdout
    assert "TP8 x CP2 x PP8 (VP8) x DP4" in done.stdout
    assert "bytes per rank" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plan", ["tp=2,pp=2", "cp=2", "dp=4"])
@pytest.mark.parametrize("workload", ["llama31_8b", "llama31_405b", "llama2_70b_lora"])
def test_every_mini_can_be_laid_out(workload, plan):
    config = resolve(workload, "mini", plan=plan, ranks=rank_count(None, plan))
    assert config.plan.world_size in (2, 4)


def test_dry_run_counts_exact_parameters():
    assert "8,030,261,248" in timetrial("train", "llama31_8b", "--preset", "official", "--dry-run").stdout


def test_launch_prints_torchrun_and_sbatch():
    done = timetrial("launch", "llama31_8b", "--nodes", 4, "--gpus-per-node", 8, "--plan", "tp=2,gbs=64")
    assert done.returncode == 0, done.stderr
    assert "torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=3" in done.stdout
    assert "#SBATCH --nodes=4" in done.stdout
    assert "#SBATCH --requeue" in done.stdout
    assert "# add --data DIR" in done.stdout
    assert "-m timetrial train llama31_8b --preset official" in done.stdout
    script = done.stdout[done.stdout.index("#!/bin/bash") :]
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_launch_refuses_a_plan_that_does_not_fit_the_nodes():
    done = timetrial("launch", "llama31_8b", "--nodes", 1, "--gpus-per-node", 8, "--plan", "tp=3")
    assert done.returncode == 2


def test_a_missed_target_is_exit_code_1_and_leaves_its_report(tmp_path):
    run = tmp_path / "run"
    done = timetrial("train", "llama31_8b", "--out", run, *tiny("evaluation.max_samples=80"))
    assert done.returncode == 1, done.stderr
    assert "not reached" in done.stderr
    assert "NOT reached" in done.stdout
    assert (run / "report.html").exists()
    assert json.loads((run / "result.json").read_text())["status"] == "aborted"
