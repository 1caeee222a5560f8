"""The commands that predict, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from timetrial.cli import main

RECORD = ["llama31_405b", "--system", "gb200-nvl72", "--gpus", "2496", "--round", "v5.0"]
PLAN = ["--plan", "tp=4,pp=8,vp=8,cp=2,mbs=1,gbs=1248,order=tp-cp-pp-dp"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command that must end with `code`."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert (ended.value.code or 0) == code
    found = capsys.readouterr()
    return found.out, found.err


def test_predict_tells_all_that_one_asks_for(capsys) -> None:
    out, _ = run(capsys, "predict", *RECORD, *PLAN)
    figures = ("Step time", "TFLOP/s per GPU", "MFU", "Time to train", "Energy", "Memory", "by rank")
    for words in (*figures, "matrix products", "pipeline bubble", "Measured", "Assumed"):
        assert words in out


def test_json_page_and_trace(capsys, tmp_path: Path) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json.gz"
    out, err = run(capsys, "predict", *RECORD, *PLAN, "--json", "--html", page, "--trace", trace)
    told = json.loads(out)
    assert told["step_time_s"] == pytest.approx(sum(told["breakdown_s"].values()))
    assert told["plan"]["pp"] == 8
    assert page.read_text().lstrip().startswith("<!")
    assert trace.stat().st_size > 10_000
    assert str(page) in err


def test_without_a_plan_the_best_is_searched(capsys) -> None:
    out, _ = run(capsys, "predict", "llama2_70b_lora", "--system", "gb200-nvl72", "--gpus", "8", "--json")
    assert json.loads(out)["plan"]["tp"] == 1, "a 70B with adapters fits one GPU"


def test_search_ranks_and_tells_why(capsys) -> None:
    out, _ = run(capsys, "search", "llama2_70b_lora", "--system", "h100-sxm", "--gpus", "8", "--round", "v5.0")
    assert "plans in" in out
    assert "do not fit into memory" in out
    out, _ = run(
        capsys, "search", "llama2_70b_lora", "--system", "h100-sxm", "--gpus", "8", "--round", "v5.0", "--json"
    )
    ranked = json.loads(out)["ranked"]
    assert [r["step_s"] for r in ranked] == sorted(r["step_s"] for r in ranked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict"], "missing WORKLOAD, --system, --gpus"),
        (["predict", "llama31_405b", "--system", "gb200-nvl72"], "missing --gpus"),
        (["predict", "llama31_405c", "--system", "gb200-nvl72", "--gpus", "8"], "llama31_405c"),
        (["predict", "llama31_405b", "--system", "gb2000", "--gpus", "8"], "gb2000"),
        (["predict", *RECORD, "--plan", "tp=5"], "tp=5"),
        (["predict", *RECORD, "--plan", "tp=4,gbs=1000"], "gbs=1000"),
        (["predict", *RECORD, *PLAN, "--precision", "fp3"], "--precision fp3"),
        (["predict", *RECORD, *PLAN, "--stack", "ngc19.01"], "ngc19.01"),
        (["predict", *RECORD, "--rows", "x.csv"], "--rows"),
        (["predict", "--rows", "nowhere.csv"], "nowhere.csv"),
        (["predict", *RECORD, "--plan", "tp=5,pp=2"], "set --gpus to a multiple of 10"),
        (["predict", *RECORD, "--plan", "tp=4,pp=8,cp=2,dp=8"], "set dp=39"),
        (
            ["predict", "llama31_8b", "--system", "h100-sxm", "--gpus", "8", "--stack", "rocm7.0"],
            "--stack rocm7.0: is for amd",
        ),
        (["predict", "llama31_8b", "--system", "h2", "--gpus", "8"], "did you mean h200-nvl or h200-sxm?"),
        (["predict", "llama31_8b", "--system", "gb300-nvl", "--gpus", "8"], "did you mean gb300-nvl72?"),
        (["systems", "h100sx"], "did you mean h100-sxm?"),
        (["predict", *RECORD, *PLAN, "--html", ""], "--html: is no file's name"),
        (["predict", *RECORD, *PLAN, "--html", "/nonexist/x.html"], "--html /nonexist/x.html: there is no directory"),
        (["predict", *RECORD, *PLAN, "--trace", "x.txt"], "--trace x.txt: must end in .json or .json.gz"),
        (["predict", *RECORD, *PLAN, "--html", "/"], "--html"),
        (["predict", *RECORD, *PLAN, "--trace", "/nonexist/x.json"], "there is no directory /nonexist"),
        (["predict", "--rows", "x.csv", "--out", "/nonexist/x.csv"], "--out /nonexist/x.csv: there is no directory"),
        (["validate", "--html", "/nonexist/x.html"], "--html /nonexist/x.html: there is no directory"),
        (["predict", *RECORD, *PLAN, "--set", "model.n_layers=-3"], "model.n_layers=-3: must be from 1"),
        (["predict", *RECORD, "--set", "model.n_layers=0"], "model.n_layers=0: must be from 1"),
        (["search", *RECORD, "--set", "model.n_layers=0"], "model.n_layers=0: must be from 1"),
        (["search", *RECORD, "--set", "data.seq_len=-8"], "data.seq_len=-8: must be at least 2"),
        (["predict", *RECORD, *PLAN, "--set", "evaluation.every_samples=0"], "evaluation.every_samples=0: must be"),
        (["predict", *RECORD, *PLAN, "--set", "round=v4.0"], "--set round: is what the run is"),
        (["systems", "cray-1"], "cray-1"),
        (["validate", "--rows", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(capsys, arguments: list[str], words: str) -> None:
    out, err = run(capsys, *arguments, code=2)
    assert out == ""
    assert err.count("\n") == 1, err
    assert words in err


def test_a_run_that_fits_nowhere_says_what_is_nearest(capsys) -> None:
    _, err = run(capsys, "predict", "llama31_405b", "--system", "l40s", "--gpus", "64", code=2)
    assert "no plan of llama31_405b fits 64" in err
    assert "nearest" in err or "micro batches" in err


def test_rows_keep_their_order_and_one_bad_row_stops_none(capsys, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text(
        "accelerator,benchmark,round,accelerators,gbs,TP,PP,VP,CP,micro_batch,precision,note\n"
        "NVIDIA H100-SXM5-80GB,llama2_70b_lora,v4.1,8,8,4,1,,1,1,fp8+fp8attn,first\n"
        "Abacus,llama2_70b_lora,v4.1,8,8,4,1,,1,1,fp8,second\n"
        "NVIDIA Blackwell GPU (GB200),llama31_405b,v5.0,512,896,4,8,8,2,1,fp8,third\n"
    )
    out, err = run(capsys, "predict", "--rows", table)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [r["note"] for r in rows] == ["first", "second", "third"]
    assert [r["status"] == "ok" for r in rows] == [True, False, True]
    assert float(rows[0]["predicted_step_time_s"]) == pytest.approx(3.7, rel=0.12)
    assert float(rows[2]["predicted_step_time_s"]) == pytest.approx(19.3, rel=0.12)
    assert float(rows[2]["predicted_ttt_min"]) == pytest.approx(121, rel=0.15)
    assert rows[1]["predicted_step_time_s"] == ""
    assert "2 of 3 rows predicted" in err
    done = tmp_path / "out.csv"
    run(capsys, "predict", "--rows", table, "--out", done)
    assert done.read_text() == out


def test_validate_prints_errors_by_group(capsys, tmp_path: Path) -> None:
    out, _ = run(capsys, "validate")
    assert "without its system" in out
    assert "one a configuration" in out
    told = json.loads(run(capsys, "validate", "--json")[0])
    assert told["all"]["n"] == len(told["runs"]) > 150
    table = tmp_path / "mine.csv"
    table.write_text(
        "benchmark,round,accelerator,accelerators,gbs,TP,precision,step_time_s\n"
        "llama2_70b_lora,v4.1,NVIDIA H100-SXM5-80GB,8,8,4,fp8+fp8attn,3.7\n"
    )
    out, _ = run(capsys, "validate", "--rows", table)
    assert "all runs                              1" in out


def test_systems_lists_machines_with_their_sources(capsys) -> None:
    out, _ = run(capsys, "systems")
    assert "gb300-nvl72" in out
    assert "ngc25.09" in out
    out, _ = run(capsys, "systems", "h100-sxm")
    assert "sources:" in out
    assert run(capsys, "systems", "H100")[0] == out, "as predict --system reads it"
    lines = {line.split()[0]: line for line in out.split("\n\n")[1].splitlines()}
    assert lines["accelerator.peak"].endswith("fp32 67, tf32 494.5, bf16 989.5, fp8 1,979 TFLOP/s")
    assert lines["accelerator.memory"].endswith("79.65 GiB")
    assert lines["accelerator.memory_bandwidth"].endswith("3,350 GB/s")
    assert lines["scale_up.bandwidth"].endswith("450 GB/s")
    assert lines["scale_up.latency"].endswith("3.4 \u00b5s")
    assert len({len(line) - len(line[2:].split(maxsplit=1)[1]) for line in lines.values()}) == 1, "one column"
    assert len(json.loads(run(capsys, "systems", "--json")[0])["systems"]) >= 12
