"""Tables of rows in, the same rows with predictions out, whatever the table looks like."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timetrial.errors import UserError
from timetrial.predict.predict import stack_of, system_of
from timetrial.predict.request import Request, request
from timetrial.predict.rows import ADDED, Answer, Results, Rows, predict_rows, read, write

FACTS = Path(__file__).parents[2] / "shared" / "facts"

GB200 = {
    "round": "v5.0", "benchmark": "llama31_405b", "accelerator": "NVIDIA Blackwell GPU (GB200)",
    "accelerators": "512", "nodes": "128", "gbs": "896", "seq_len": "8192", "TP": "4", "PP": "8", "VP": "8",
    "CP": "2", "EP": "1", "DP": "8", "micro_batch": "1", "precision": "fp8", "tp_pp_dp_mapping": "True",
    "tp_comm_overlap": "True", "asym_pp": "True", "segment": "16",
}  # fmt: skip
"""MLPerf Training v5.0, 512 GB200."""


def answer(wanted: Request) -> Answer:
    return Answer(step_time_s=1.0, memory_bytes=2.0**30, tflops_per_gpu=3.0, ttt_min=4.0)


def table(tmp_path: Path, text: str | bytes) -> Rows:
    path = tmp_path / "rows.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path)


def out(rows: Rows, results: Results, tmp_path: Path) -> list[dict[str, str]]:
    path = tmp_path / "out.csv"
    write(rows, results, path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=rows.delimiter))


def test_a_submission_s_row() -> None:
    wanted = request(GB200)
    plan = wanted.plan
    assert (plan.tp, plan.pp, plan.vp, plan.cp, plan.ep, plan.dp) == (4, 8, 8, 2, 1, 8)
    assert (plan.mbs, plan.gbs, plan.zero, plan.shard, plan.order) == (1, 896, 1, 0, "tp-cp-pp-dp")
    assert (wanted.config.workload, wanted.config.round, wanted.round) == ("llama31_405b", "v5.0", "v5.0")
    assert (wanted.precision, wanted.attention, wanted.accelerators, wanted.nodes) == ("fp8", "bf16", 512, 128)
    assert (wanted.hints.tp_comm_overlap, wanted.hints.segment, wanted.hints.sharp) == (True, 16, None)
    assert wanted.converges
    assert wanted.assumed == ()
    assert wanted.config.evaluation.every_samples == 52 * 896, "the evaluation rule is of the row's batch size"


def test_columns_in_any_order_case_and_spelling() -> None:
    renamed = {
        "Tensor-Parallel": "4", "  gpus ": "512", "PIPELINE PARALLEL": "8", "vpp": "8.0", "Context_Parallel": "2",
        "Global Batch Size": "896", "micro-batch-size": "1.0", "Workload": "Llama31-405B", "Dtype": "FP8",
        "ROUND": "5.0", "GPU": "GB200", "Use_TP_PP_DP_mapping": "1", "anything else": "x", "seq": " 8192 ",
    }  # fmt: skip
    assert request(renamed).config == request(GB200).config


def test_values_as_people_write_them() -> None:
    wanted = request({**GB200, "EP": "n/a", "VP": " 8.0 ", "gbs": '"1,792"', "sharp": "yes", "cuda_graph": "True"})
    assert (wanted.plan.ep, wanted.plan.vp, wanted.plan.gbs) == (1, 8, 1792)
    assert (wanted.hints.sharp, wanted.hints.cuda_graph) == (True, "full_iter")


def test_what_a_row_leaves_open_is_what_submissions_use_and_is_told() -> None:
    row = {"benchmark": "llama31_8b", "accelerator": "H100", "accelerators": "64"}
    wanted = request({**row, "gbs": "128"})
    assert (wanted.plan.dp, wanted.plan.mbs, wanted.plan.order, wanted.plan.zero) == (64, 1, "tp-cp-dp-pp", 1)
    assert wanted.precision == "fp8"
    assert {"precision fp8", "micro batch 1", "round v6.1"} <= set(wanted.assumed)
    assert request({**row, "gbs": "128", "accelerator": "NVIDIA A100-SXM4-80GB"}).precision == "bf16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"benchmark": ""}, "no benchmark"),
        ({"benchmark": "bert"}, "no workload for bert yet"),
        ({"benchmark": "€llama31_8b"}, "no workload for €llama31_8b yet"),
        ({"benchmark": "gpt3"}, "no workload for gpt3 yet"),
        ({"benchmark": "", "model": "Llama 3 8B (0 layers)"}, "model.n_layers=0: must be from 1"),
        ({"accelerator": "n/a"}, "no accelerator"),
        ({"TP": "four"}, "TP=four: must be a whole number above 0"),
        ({"TP": "0"}, "TP=0"),
        ({"TP": "-4"}, "TP=-4"),
        ({"TP": "4.5"}, "TP=4.5"),
        ({"TP": "9" * 30}, "TP=999"),
        ({"PP": "7"}, "TP=4 x PP=7 x CP=2 = 56 does not divide 512 accelerators"),
        ({"gbs": "897"}, "gbs=897 is not a multiple of micro batch 1 x DP=8"),
        ({"EP": "8"}, "EP=8 needs a mixture-of-experts model"),
        ({"precision": "int3"}, "precision=int3: is not known"),
        ({"sharp": "maybe"}, "sharp=maybe: must be true or false"),
        ({"round": "soon"}, "round=soon: is not a round"),
        ({"accelerators": "", "nodes": "", "DP": ""}, "no number of accelerators"),
    ],
)
def test_why_a_row_has_no_request(changes: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as error:
        request({**GB200, **changes})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_data_parallel_degree_that_does_not_fit_is_derived_and_told() -> None:
    wanted = request({**GB200, "DP": "16"})
    assert wanted.plan.dp == 8
    assert any("dp=16 does not make 512" in note for note in wanted.assumed)
    assert request({**GB200, "accelerators": "", "nodes": ""}).accelerators == 512


def test_old_rounds_take_the_nearest_rules_and_say_so() -> None:
    wanted = request({"benchmark": "llama2_70b_lora", "round": "v4.0", "accelerator": "H100", "gpus": "8", "gbs": "8"})
    assert (wanted.round, wanted.config.round) == ("v4.0", "v5.0")
    assert wanted.config.lora is not None
    assert any("rules of v5.0" in note for note in wanted.assumed)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nvfp4+fp8attn+healing@350", ("nvfp4", "fp8", "", 350)),
        ("fp8(tensorwise)+fp8attn", ("fp8", "fp8", "tensorwise", None)),
        ("FP8-CS", ("fp8", "bf16", "tensorwise", None)),
        ("fp8 current scaling", ("fp8", "bf16", "tensorwise", None)),
        ("FP8 delayed scaling", ("fp8", "bf16", "delayed", None)),
        ("MXFP8", ("mxfp8", "bf16", "", None)),
        ("BF16", ("bf16", "bf16", "", None)),
        ("fp32", ("fp32", "fp32", "", None)),
    ],
)
def test_precisions(text: str, parts: tuple[str, str, str, int | None]) -> None:
    wanted = request({**GB200, "precision": text})
    assert (wanted.precision, wanted.attention, wanted.hints.recipe, wanted.hints.healing_step) == parts
    assert wanted.plan.precision == ("fp32" if text == "fp32" else "bf16")
    assert wanted.recipe == ("fp8(tensorwise)" if parts[2] == "tensorwise" else parts[0])


@pytest.mark.parametrize(
    ("written", "name"),
    [("nvidia h100", "h100-sxm"), ("AMD MI355X", "mi355x"), ("AMD Instinct MI300X", "mi300x"), ("H100", "h100-sxm")],
)
def test_accelerators_may_have_their_vendor_before_them(written: str, name: str) -> None:
    assert system_of(request({**GB200, "accelerator": written})).name == name


@pytest.mark.parametrize("written", ["V5.1", "5.1", "training v5.1", "v5.1"])
def test_rounds_as_people_write_them(written: str) -> None:
    wanted = request({**GB200, "round": written})
    assert stack_of(wanted, system_of(wanted)).name == "ngc25.09"
    assert wanted.config.round == "v5.1"


def test_two_columns_of_one_name_must_agree(tmp_path: Path) -> None:
    table = tmp_path / "two.csv"
    table.write_text(
        "accelerator,benchmark,accelerators,TP,tp,note,note\n"
        "H100,llama2_70b_lora,8,4,8,a,b\nH100,llama2_70b_lora,8,4,4,a,b\nH100,llama2_70b_lora,8,,4,a,b\n"
    )
    rows = read(table).rows
    assert rows[0].wanted is None
    assert rows[0].problem == "columns 4 and 5 are both TP and say 4 and 8; keep one"
    assert [r.wanted.plan.tp for r in rows[1:] if r.wanted] == [4, 4]


def test_models_of_vendors() -> None:
    row = {"task": "pretrain", "model": "LLAMA3_70B", "system": "DGX-GB200", "gpus": "64", "gbs": "256", "mbs": "2",
           "seq": "8192", "fsdp": "64", "tp": "1", "pp": "1", "cp": "1", "vp": "n/a", "ep": "n/a", "precision": "FP8",
           "release": "26.04"}  # fmt: skip
    wanted = request(row)
    assert wanted.config.model.n_params() == 70_553_706_496, "meta-llama/Meta-Llama-3-70B, as its card says"
    assert (wanted.plan.zero, wanted.plan.shard, wanted.converges) == (3, 64, False)
    assert wanted.hints.release == "26.04"
    assert request({**row, "model": "Llama 3 8B"}).config.model.n_params() == 8_030_261_248
    assert request({**row, "model": "Llama3.1-405B", "fsdp": "0"}).config.model.n_params() == 405_853_388_800
    assert request({**row, "model": "Llama3.1-405B (30 layers)"}).config.model.n_layers == 30
    assert request({**row, "task": "lora"}).config.lora is not None
    with pytest.raises(UserError, match="no workload for DeepSeekV3 yet"):
        request({**row, "model": "DeepSeekV3"})
    with pytest.raises(UserError, match="no workload for task rl yet"):
        request({**row, "task": "rl"})


HEAD = "benchmark,accelerator,accelerators,gbs,TP,PP,precision\n"
GOOD = "llama31_8b,H100,8,32,1,1,fp8\n"


@pytest.mark.parametrize(
    "text",
    [
        HEAD + GOOD,
        (HEAD + GOOD).replace("\n", "\r\n"),
        (HEAD + GOOD).encode("utf-8-sig"),
        (HEAD + GOOD).encode("utf-16"),
        HEAD + "\n   \n" + GOOD + "\n\n",
        (HEAD + GOOD).replace(",", ";"),
        (HEAD + GOOD).replace(",", "\t"),
        (HEAD + GOOD).rstrip("\n"),
        HEAD + '"llama31_8b","H100","8","32","1","1","fp8"\n',
        HEAD + "llama31_8b,H100,8,32\n",
        HEAD.replace("\n", ",\n") + GOOD.replace("\n", ",\n"),
    ],
)
def test_tables_as_files_come(tmp_path: Path, text: str | bytes) -> None:
    rows = table(tmp_path, text)
    results = predict_rows(rows, answer)
    assert results.summary == "1 of 1 row predicted"
    row = out(rows, results, tmp_path)[0]
    assert (row["predicted_step_time_s"], row["predicted_memory_gib"], row["predicted_ttt_min"]) == ("1", "1", "4")
    assert (row["status"], row["benchmark"]) == ("ok", "llama31_8b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b\n1,2\n", "no column of the first line is known"),
        (b"\xff\x00\x80benchmark", "is not UTF-8"),
        ("benchmark\n\0\n", "zero bytes"),
        ("benchmark,gpus\nllama31_8b," + "8" * 200_000, "is no CSV"),
        ('benchmark,gpus\nllama31_8b,8\n"llama31_8b,8\nllama31_8b,8\n', "line 3: a quote opens and never closes"),
    ],
)
def test_what_is_no_table(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        table(tmp_path, text)
    assert "\n" not in str(error.value)


def test_no_file_a_directory_and_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.csv")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)
    rows = table(tmp_path, HEAD)
    assert predict_rows(rows, answer).summary == "0 of 0 rows predicted"
    assert out(rows, predict_rows(rows, answer), tmp_path) == []


def test_one_bad_row_never_stops_the_others(tmp_path: Path) -> None:
    def predict(wanted: Request) -> Answer:
        if wanted.system == "H200":
            raise KeyError("layers\nof two lines")
        if wanted.system == "Abacus":
            raise UserError("no system Abacus")
        if wanted.system == "Broken":
            return Answer(step_time_s=float("nan"))
        return answer(wanted)

    lines = [GOOD, GOOD.replace("H100", "H200"), GOOD.replace("H100", "Abacus"), GOOD.replace("H100", "Broken"),
             "bert,H100,8,32,1,1,fp8\n", GOOD.replace("fp8", "fp8,1,2"), ",,,,,,\n", GOOD]  # fmt: skip
    rows = table(tmp_path, HEAD + "".join(lines))
    results = predict_rows(rows, predict)
    assert (
        results.summary
        == "2 of 8 rows predicted, 4 without a prediction (see status), 2 broke the predictor (see status)"
    )
    found = out(rows, results, tmp_path)
    assert [row["accelerator"] for row in found] == ["H100", "H200", "Abacus", "Broken", "H100", "H100", "", "H100"]
    statuses = [row["status"] for row in found]
    assert statuses[1] == "KeyError: 'layers\\nof two lines'"
    assert statuses[2] == "no system Abacus"
    assert statuses[3].startswith("ValueError: the prediction is no number")
    assert statuses[5] == "line 7 has 9 cells for 7 columns; quote those with commas"
    assert statuses[6] == "the row is empty"
    assert all(row["predicted_step_time_s"] == "" for row, s in zip(found, statuses, strict=True) if s != "ok")


def test_all_columns_come_back_in_their_order_and_ours_follow(tmp_path: Path) -> None:
    text = 'note,benchmark,note,accelerator,accelerators\n"a, ""b""",llama31_8b,c,H100,32\n'
    rows = table(tmp_path, text)
    path = tmp_path / "out.csv"
    write(rows, predict_rows(rows, answer), path)
    lines = list(csv.reader(io.StringIO(path.read_text())))
    assert lines[0] == ["note", "benchmark", "note", "accelerator", "accelerators", *ADDED]
    assert lines[1] == ['a, "b"', "llama31_8b", "c", "H100", "32", "1", "1", "3", "4", "ok"]
    again = read(path)
    write(again, predict_rows(again, answer), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == path.read_text()


def test_the_input_is_never_written_over(tmp_path: Path) -> None:
    rows = table(tmp_path, HEAD + GOOD)
    results = predict_rows(rows, answer)
    (tmp_path / "link.csv").symlink_to(tmp_path / "rows.csv")
    for name in ("rows.csv", "link.csv"):
        with pytest.raises(UserError, match="is the table that was read"):
            write(rows, results, tmp_path / name)
    assert (tmp_path / "rows.csv").read_text() == HEAD + GOOD
    with pytest.raises(UserError, match="cannot be written"):
        write(rows, results, tmp_path / "none" / "out.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.csv", "rows.csv"]


def test_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(tmp_path, HEAD + GOOD)
    write(rows, predict_rows(rows, answer), "-")
    assert capsys.readouterr().out.splitlines()[1] == GOOD.strip() + ",1,1,3,4,ok"


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GB200)), st.text(max_size=12)))
def test_no_cell_breaks_a_row(changes: dict[str, str]) -> None:
    try:
        wanted = request({**GB200, **changes})
    except UserError:
        return
    plan = wanted.plan
    assert plan.world_size == wanted.accelerators
    assert plan.gbs % (plan.mbs * plan.dp) == 0


@pytest.mark.parametrize(("name", "expected"), [("llm_step_times.csv", 143), ("vendor_step_times.csv", 62)])
def test_published_tables(name: str, expected: int, tmp_path: Path) -> None:
    """All rows of dense Llamas become requests, but the one whose configuration file does not match its result."""
    if not (FACTS / name).exists():
        pytest.skip("published tables are not here")
    rows = read(FACTS / name)
    llamas = [row for row in rows.rows if any("llama" in cell.lower() for cell in row.cells[:7])]
    found = [row.wanted for row in llamas if row.wanted is not None]
    assert all(wanted.plan.world_size == wanted.accelerators for wanted in found)
    assert len(found) == expected
    assert [row.problem for row in llamas if row.wanted is None] == [
        "gbs=36 is not a multiple of micro batch 1 x DP=72 = 72; change gbs, the micro batch, or TP, PP or CP, "
        "which make DP"
    ] * (len(llamas) - expected)


def test_reading_rows_needs_no_torch() -> None:
    code = "import sys, timetrial.predict.rows, timetrial.predict.memory, timetrial.predict.energy"
    code += "; import timetrial.predict.converge as c; c.samples('llama31_8b', 'v6.0', 48)"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
