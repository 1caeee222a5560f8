"""Building token files: what is built, and every way in which it can be interrupted or go wrong."""

import gzip
import hashlib
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from timetrial.config import Data
from timetrial.data import build as building
from timetrial.data import bundled, c4, govreport, tokenizer
from timetrial.data.build import build, verify
from timetrial.data.progress import Console, Progress
from timetrial.data.samples import StreamSamples
from timetrial.data.source import open_source
from timetrial.errors import UserError

SHARDS = 5


def quiet(_):
    pass


def texts_of(shard, count=60):
    """Documents of about 1,500 characters, cut from the addresses; every shard has others."""
    whole = bundled.documents("sotu")[shard * 3].text + bundled.documents("sotu")[shard * 3 + 1].text
    return [whole[i : i + 1500] for i in range(0, 1500 * count, 1500) if whole[i : i + 1500]]


def write_shard(path, texts):
    lines = "".join(json.dumps({"text": t, "url": "http://x", "timestamp": "2019"}) + "\n" for t in texts)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


@pytest.fixture
def raw(tmp_path):
    """A directory shaped like C4 3.0.1, some of its files."""
    directory = tmp_path / "c4"
    directory.mkdir()
    for i in range(SHARDS):
        write_shard(directory / f"c4-train.{768 + i:05d}-of-01024.json.gz", texts_of(i))
    write_shard(directory / "c4-train.00001-of-01024.json.gz", ["not among the last quarter"])
    for i in range(2):
        write_shard(directory / f"c4-validation.{i:05d}-of-00008.json.gz", texts_of(40 + i, 20))
    return directory


@pytest.fixture
def tok_file(tmp_path):
    """A tokenizer as Hugging Face lays it out."""
    directory = tmp_path / "sotu-tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(tokenizer.bundled_tokenizer().json)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.EOS}))
    return directory


def tree(directory):
    """Every file's bytes, by relative path."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("workers", [1, 2])
def test_build_holds_the_documents_in_order_without_end_tokens(raw, tok_file, tmp_path, workers):
    seen = []
    metas = build("c4", raw, tok_file, tmp_path / "out", workers, seen.append)
    tok = tokenizer.bundled_tokenizer()
    stream = [i for s in range(SHARDS) for t in texts_of(s) for i in tok.backend.encode(t).ids]
    source = open_source(Data(source="c4", path=str(tmp_path / "out"), seq_len=64, tokenizer="sotu-tokenizer"))
    assert isinstance(source.train, StreamSamples)
    assert source.train.tokens.read(0, len(stream)).tolist() == stream
    assert metas["train"].tokens == len(stream) == len(source.train.tokens)
    assert metas["train"].documents == sum(len(texts_of(s)) for s in range(SHARDS))
    heldout = [i for s in (40, 41) for t in texts_of(s, 20) for i in tok.backend.encode(t).ids]
    assert source.heldout[3]["labels"].tolist() == heldout[193:257]
    assert [p.name for p in metas["train"].parts] == [f"{768 + i:05d}" for i in range(SHARDS)]
    names = {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {
        *(f"{768 + i:05d}.{suffix}" for i in range(SHARDS) for suffix in ("bin", "idx")),
        *("validation.bin", "validation.idx", "meta.json", "dataset.json", "tokenizer.json"),
    }
    last = seen[-1]
    assert last.finished
    assert last.bytes_done == last.bytes_total
    assert last.tokens == metas["train"].tokens + metas["heldout"].tokens
    assert verify(tmp_path / "out") == metas


def test_workers_make_the_same_bytes(raw, tok_file, tmp_path):
    trees = []
    for workers in (1, 3):
        build("c4", raw, tok_file, tmp_path / "out", workers, quiet)
        trees.append(tree(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*.bin"):
            path.unlink()  # so that the second build makes every part again
    assert trees[0] == trees[1]


def start_build(raw, tok_file, out, workers):
    code = (
        "import sys; from timetrial.data.build import build\n"
        "if __name__ == '__main__': build('c4', *sys.argv[1:4], int(sys.argv[4]), lambda p: None)\n"
    )
    script = raw.parent / "run_build.py"
    script.write_text(code)
    source = str(Path(building.__file__).parents[2])
    command = [sys.executable, str(script), str(raw), str(tok_file), str(out), str(workers)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, stderr=subprocess.PIPE)


def children_of(pid):
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_builds_go_on_and_give_the_same_bytes(tok_file, tmp_path, workers):
    raw = tmp_path / "c4"
    raw.mkdir()
    for i in range(SHARDS):
        write_shard(raw / f"c4-train.{768 + i:05d}-of-01024.json.gz", texts_of(i, 10**6) * 4)
    write_shard(raw / "c4-validation.00000-of-00008.json.gz", texts_of(40, 20))
    began = time.monotonic()
    build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    part_s = (time.monotonic() - began) / SHARDS
    expected = tree(tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            path.unlink()
    rng, kept = random.Random(workers), []
    for attempt in range(3):  # killed while a part is being written, each time a part further on
        process = start_build(raw, tok_file, tmp_path / "out", workers)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            finished = len(list((tmp_path / "out" / "train").glob("*.json")))
            if finished > attempt and list((tmp_path / "out" / "train").glob("*.tmp")):
                break
            time.sleep(0.002)
        time.sleep(rng.random() * part_s / 4)  # within the part, however fast the machine is
        workers_seen = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        kept.append(len(list((tmp_path / "out" / "train").glob("*.json"))))
        while any(alive(pid) for pid in workers_seen) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(alive(pid) for pid in workers_seen), "worker processes outlive their build"
    assert not (tmp_path / "out" / "train" / "meta.json").exists()
    assert kept == sorted(kept)
    assert kept[-1] > kept[0]
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "train").glob("0*.bin")}
    build("c4", raw, tok_file, tmp_path / "out", workers, quiet)
    assert tree(tmp_path / "out") == expected
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "train").glob("0*.bin")}
    assert sum(after[name] == before[name] for name in before) >= kept[-1]  # whole parts were not made again


def test_finished_build_is_not_repeated_but_repaired(raw, tok_file, tmp_path):
    out = tmp_path / "out"
    build("c4", raw, tok_file, out, 1, quiet)
    expected, stamps = tree(out), {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")}
    build("c4", raw, tok_file, out, 1, quiet)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")} == stamps
    (out / "train" / "00770.bin").write_bytes(b"torn")
    (out / "heldout" / "meta.json").unlink()
    build("c4", raw, tok_file, out, 1, quiet)
    assert tree(out) == expected
    assert stamps[out / "train" / "00769.bin"] == (out / "train" / "00769.bin").stat().st_mtime_ns


def test_changed_input_is_built_again_and_missing_input_is_refused(raw, tok_file, tmp_path):
    out = tmp_path / "out"
    before = build("c4", raw, tok_file, out, 1, quiet)
    write_shard(raw / "c4-train.00769-of-01024.json.gz", texts_of(30))
    after = build("c4", raw, tok_file, out, 1, quiet)
    assert [a == b for a, b in zip(before["train"].parts, after["train"].parts, strict=True)] == [1, 0, 1, 1, 1]
    (raw / "c4-train.00770-of-01024.json.gz").unlink()
    with pytest.raises(UserError, match=r"train has part 00770, for which --input has no file; put the file back"):
        build("c4", raw, tok_file, out, 1, quiet)


def test_altered_file_is_found_and_named(raw, tok_file, tmp_path):
    out = tmp_path / "out"
    build("c4", raw, tok_file, out, 1, quiet)
    path = out / "train" / "00771.bin"
    altered = bytearray(path.read_bytes())
    altered[100] ^= 4
    path.write_bytes(altered)
    with pytest.raises(UserError, match=r"00771\.bin was altered.*timetrial data build c4 --input .* --tokenizer "):
        verify(out)
    (out / "tokenizer.json").write_text(tokenizer.train(["other text"], 300))
    with pytest.raises(UserError, match=r"tokenizer\.json was altered"):
        verify(out)


def test_wrong_tokenizer_is_named(raw, tok_file, tmp_path):
    build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    other = tmp_path / "other-tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text(tokenizer.train(["some text"], 300))
    with pytest.raises(UserError, match=r"made with tokenizer sotu-tokenizer .*, not with other-tokenizer"):
        build("c4", raw, other, tmp_path / "out", 1, quiet)
    data = Data(source="c4", path=str(tmp_path / "out"), seq_len=64, tokenizer="llama-3.1-8b")
    with pytest.raises(UserError, match=r"made with tokenizer sotu-tokenizer \(2,048 ids\), not with llama-3.1-8b"):
        open_source(data)
    for name in ("train", "validation"):
        (raw / f"{name}.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds c4, not govreport"):
        build("govreport", raw, tok_file, tmp_path / "out", 1, quiet)


def bad_gzip(path):
    path.write_bytes(path.read_bytes()[:-200])


def bad_bytes(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 50] = bytes(50)
    path.write_bytes(data)


def not_gzip(path):
    path.write_bytes(b"plain text")


def bad_json(path):
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n{"text": "cut off\n'))


def no_text(path):
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n\n{"body": "other"}\n'))


def bad_utf8(path):
    path.write_bytes(gzip.compress(b'{"text": "\xff"}\n'))


def empty(path):
    path.write_bytes(gzip.compress(b""))


def no_bytes(path):
    path.write_bytes(b"")


DAMAGES = {
    bad_gzip: r"00769-of-01024\.json\.gz: damaged gzip after line \d+ .*fetch the file again",
    bad_bytes: r"00769-of-01024\.json\.gz(: damaged gzip after line \d+| line \d+: no JSON)",
    not_gzip: r"00769-of-01024\.json\.gz: damaged gzip after line 0",
    bad_json: r"00769-of-01024\.json\.gz line 2: no JSON",
    no_text: r'00769-of-01024\.json\.gz line 3: no text under "text"',
    bad_utf8: r"00769-of-01024\.json\.gz line 1: no JSON .*utf-8",
    empty: r"00769-of-01024\.json\.gz holds no document",
    no_bytes: r"00769-of-01024\.json\.gz holds no document",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_shard_is_one_line_and_the_others_survive(raw, tok_file, tmp_path, damage):
    damage(raw / "c4-train.00769-of-01024.json.gz")
    with pytest.raises(UserError, match=DAMAGES[damage]) as caught:
        build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    assert "\n" not in str(caught.value)
    assert {p.name for p in (tmp_path / "out" / "train").iterdir()} == {"00768.bin", "00768.idx", "00768.json"}
    write_shard(raw / "c4-train.00769-of-01024.json.gz", texts_of(1))
    build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    verify(tmp_path / "out")


def test_damaged_shard_in_a_worker_process_is_the_same_line(raw, tok_file, tmp_path):
    bad_json(raw / "c4-train.00769-of-01024.json.gz")
    with pytest.raises(UserError, match=DAMAGES[bad_json]):
        build("c4", raw, tok_file, tmp_path / "out", 2, quiet)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_killed_worker_is_one_line(raw, tok_file, tmp_path):
    write_shard(raw / "c4-train.00768-of-01024.json.gz", texts_of(0, 10**6) * 60)

    def kill_one(_):
        for pid in children_of(os.getpid()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError, match="a build process was killed, perhaps for want of memory; give fewer --workers"):
        build("c4", raw, tok_file, tmp_path / "out", 2, kill_one)


def test_full_disk_is_one_line_and_the_build_goes_on_later(raw, tok_file, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_shard(raw / "c4-train.00770-of-01024.json.gz", texts_of(2, 10**6) * 8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(UserError, match=r"no space left for .*00770\.bin; free some space or choose another --out"):
            build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {p.name for p in (tmp_path / "out" / "train").glob("*.bin")} == {"00768.bin", "00769.bin"}
    assert not list((tmp_path / "out").rglob("*.tmp"))
    build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    verify(tmp_path / "out")


def test_two_builds_at_once_are_refused(raw, tok_file, tmp_path):
    def second(_):
        with pytest.raises(UserError, match="another build is writing"):
            build("c4", raw, tok_file, tmp_path / "out", 1, quiet)

    build("c4", raw, tok_file, tmp_path / "out", 1, second)


def test_what_cannot_be_built_is_refused(raw, tok_file, tmp_path):
    cases = [
        (("c5", raw, tok_file), r"cannot build 'c5'; there are c4, govreport"),
        (("c4", tmp_path / "nowhere", tok_file), r"--input .*nowhere is no directory"),
        (("c4", raw, tmp_path / "nowhere"), r"tokenizer .*nowhere: No such file"),
        (("c4", tok_file, tok_file), r"no C4 training file: needed are c4-train\.00768-of-01024\.json\.gz"),
        (("govreport", raw, tok_file), r"has no train\.jsonl"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            build(*arguments, tmp_path / "out", 1, quiet)
    for path in raw.glob("c4-validation*"):
        path.unlink()
    with pytest.raises(UserError, match="no C4 validation file"):
        build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    with pytest.raises(UserError, match="c4 is not bundled; build it with"):
        open_source(Data(source="c4"))


def test_validation_stops_at_the_reference_count(raw, tok_file, tmp_path, monkeypatch):
    monkeypatch.setattr(c4, "HELD_OUT_DOCUMENTS", 25)  # 20 of the first file, 5 of the second
    metas = build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    assert metas["heldout"].documents == 25


def test_progress_knows_rate_and_time_left():
    progress = Progress(600, 1000, 7, 1234, elapsed_s=2.0, bytes_before=200)
    assert progress.bytes_per_s == 200
    assert progress.left_s == 2.0
    assert str(progress) == " 60%  1,234 tokens of 7 documents, 0.00 MB/s, 0 min 02 s left"
    assert Progress(0, 1000, 0, 0, 1.0).left_s is None


def test_console_prints_seldom_and_the_end_once(capsys):
    console = Console()
    for done in (0, 100, 200, 1000, 1000):
        console(Progress(done, 1000, done, done, elapsed_s=1.0))
    assert [line[:4] for line in capsys.readouterr().err.splitlines()] == ["  0%", "100%"]


def test_builder_waits_without_spinning(raw, tok_file, tmp_path):
    calls = []
    build("c4", raw, tok_file, tmp_path / "out", 2, calls.append)
    assert len(calls) < 40  # one a second, and one for each process that ends


# ---- Megatron's files ----------------------------------------------------------------------------


def write_megatron(prefix, documents, code, dtype):
    """Megatron's own layout, written from its description."""
    lengths = np.array([len(d) for d in documents], dtype=np.int32)
    width = np.dtype(dtype).itemsize
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * width
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    header += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(lengths) + 1)
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    )
    prefix.with_name(f"{prefix.name}.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(4, np.int32), (8, np.uint16)])
def test_tokenized_c4_of_mlcommons_is_taken_as_it_is(tok_file, tmp_path, code, dtype):
    raw = tmp_path / "c4"
    raw.mkdir()
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 2048, rng.integers(1, 50)) for _ in range(300)]
    write_megatron(raw / "c4-train.en_6_text_document", documents[:100], code, dtype)
    write_megatron(raw / "c4-train.en_7_text_document", documents[100:200], code, dtype)
    write_megatron(raw / "c4-validation-91205-samples.en_text_document", documents[200:], code, dtype)
    metas = build("c4", raw, tok_file, tmp_path / "out", 2, quiet)
    assert (metas["train"].documents, metas["heldout"].documents) == (200, 100)
    source = open_source(Data(source="c4", path=str(tmp_path / "out"), seq_len=16))
    stream = np.concatenate(documents[:200])
    assert source.train.tokens.read(0, len(stream)).tolist() == stream.tolist()
    assert source.train.tokens.document(1, 7).tolist() == documents[107].tolist()
    verify(tmp_path / "out")


def test_megatron_files_that_do_not_fit_are_refused(tok_file, tmp_path):
    raw = tmp_path / "c4"
    raw.mkdir()
    for name in ("c4-train.en_6_text_document", "c4-validation-91205-samples.en_text_document"):
        write_megatron(raw / name, [np.array([1, 2, 5000])], 4, np.int32)
    with pytest.raises(UserError, match=r"holds id 5,000, tokenizer sotu-tokenizer has 2,048"):
        build("c4", raw, tok_file, tmp_path / "a", 1, quiet)
    (raw / "c4-train.en_6_text_document.bin").write_bytes(bytes(8))
    with pytest.raises(UserError, match=r"has 8 bytes, its \.idx tells of 12"):
        build("c4", raw, tok_file, tmp_path / "b", 1, quiet)
    (raw / "c4-train.en_6_text_document.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(UserError, match=r"no Megatron index of version 1"):
        build("c4", raw, tok_file, tmp_path / "c", 1, quiet)
    (raw / "c4-train.en_6_text_document.idx").unlink()
    with pytest.raises(UserError, match=r"en_6_text_document\.idx: No such file"):
        build("c4", raw, tok_file, tmp_path / "d", 1, quiet)


# ---- GovReport -----------------------------------------------------------------------------------


LENGTH = 160


@pytest.fixture
def short(monkeypatch):
    """GovReport packed to few tokens instead of 8,192."""
    monkeypatch.setitem(building.SOURCES, "govreport", partial(govreport.jobs, seq_len=LENGTH))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reports(count):
    pairs = bundled.pairs("synopses")[:count]
    return [{"id": p.name, "pid": "0", "input": p.text, "output": p.summary} for p in pairs]


@pytest.mark.usefixtures("short")
def test_raw_govreport_is_packed(tok_file, tmp_path):
    raw = tmp_path / "gov_report"
    raw.mkdir()
    write_jsonl(raw / "train.jsonl", reports(400))
    write_jsonl(raw / "validation.jsonl", reports(300))
    metas = build("govreport", raw, tok_file, tmp_path / "out", 1, quiet)
    source = open_source(Data(source="govreport", path=str(tmp_path / "out"), seq_len=LENGTH))
    tok = tokenizer.bundled_tokenizer()
    texts = [f"### Summarize the following text:\n {r['input']}\n ### Summary:\n {r['output']}" for r in reports(400)]
    rows = [[tok.bos_id, *tok.backend.encode(t).ids, tok.eos_id] for t in texts]
    fit = [r for r in rows if len(r) <= LENGTH]
    expected = []
    for share in np.array_split(np.arange(len(fit)), 8):
        chain = [i for k in share for i in fit[k]]
        expected += [chain[k : k + LENGTH] for k in range(0, len(chain) // LENGTH * LENGTH, LENGTH)]
    assert metas["train"].documents == len(source.train) == len(expected) > 5
    for i, ids in enumerate(expected):
        assert source.train[i]["tokens"].tolist() == ids
        assert source.train[i]["labels"].tolist() == [*ids[1:], -100]
    assert 0 < (source.heldout[0]["labels"] != -100).sum() < 120
    with pytest.raises(UserError, match="is packed to 160 tokens, the run wants 8192"):
        open_source(Data(source="govreport", path=str(tmp_path / "out")))


def packed_rows(count, seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = rng.integers(0, 2048, LENGTH)
        rows.append({"input_ids": ids.tolist(), "labels": np.where(rng.random(LENGTH) < 0.5, -100, ids).tolist()})
    return rows


def check_packed(out, train):
    source = open_source(Data(source="govreport", path=str(out), seq_len=LENGTH))
    assert len(source.train) == len(train)
    for i, row in enumerate(train):
        assert source.train[i]["tokens"].tolist() == row["input_ids"]
        assert source.train[i]["labels"].tolist() == [*row["labels"][1:], -100]  # shifted once, here


@pytest.mark.usefixtures("short")
def test_packed_govreport_is_copied(tok_file, tmp_path):
    raw = tmp_path / "packed"
    raw.mkdir()
    train = packed_rows(20, 1)
    write_jsonl(raw / "train.jsonl", train)
    write_jsonl(raw / "validation.jsonl", packed_rows(5, 2))
    build("govreport", raw, tok_file, tmp_path / "out", 2, quiet)
    check_packed(tmp_path / "out", train)
    for change, message in [
        ({"labels": [1] * LENGTH}, "row 2: labels are neither the ids nor -100"),
        ({"input_ids": [1] * (LENGTH - 1)}, "row 2: 159 ids and 160 labels, not 160 of each"),
        ({"input_ids": [4096] * LENGTH}, "row 2: id 4096, but tokenizer sotu-tokenizer has 2,048"),
        ({"labels": "x"}, "row 2: rows of input_ids and labels are needed"),
    ]:
        write_jsonl(raw / "train.jsonl", [train[0], {**train[1], **change}])
        with pytest.raises(UserError, match=message):
            build("govreport", raw, tok_file, tmp_path / "out2", 1, quiet)


@pytest.mark.usefixtures("short")
def test_packed_parquet_is_copied(tok_file, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, an optional extra, is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = tmp_path / "packed"
    raw.mkdir()
    train = packed_rows(40, 3)
    parquet.write_table(pyarrow.Table.from_pylist(train[:25]), raw / "train-00000-of-00002.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(train[25:]), raw / "train-00001-of-00002.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(packed_rows(4, 4)), raw / "validation-00000-of-00001.parquet")
    build("govreport", raw, tok_file, tmp_path / "out", 1, quiet)
    check_packed(tmp_path / "out", train)
    (raw / "train-00000-of-00002.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"train-00000-of-00002\.parquet cannot be read as parquet"):
        build("govreport", raw, tok_file, tmp_path / "out2", 1, quiet)


def test_shards_of_the_test_are_not_the_same_text():
    sums = {hashlib.sha256("".join(texts_of(i)).encode()).hexdigest() for i in (*range(SHARDS), 40, 41)}
    assert len(sums) == SHARDS + 2


def text_jobs(shards, validation=8):
    inputs = tuple(Path(f"c4-validation.{i:05d}-of-00008.json.gz") for i in range(validation))
    train = [c4.TextPart("train", f"{i:05d}", (Path(f"c4-train.{i:05d}-of-01024.json.gz"),)) for i in shards]
    return [*train, c4.TextPart("heldout", "validation", inputs, c4.HELD_OUT_DOCUMENTS)]


@pytest.mark.parametrize(
    ("shards", "whole"),
    [
        (range(768, 896), "whole for llama31_8b"),
        (range(768, 897), "whole for llama31_8b"),
        (range(768, 1024), "whole for llama31_8b and llama31_405b"),
        (range(768, 895), None),
        (range(769, 897), None),
        (range(896, 1024), None),
    ],
)
def test_the_official_training_files_are_counted(shards, whole):
    found, warnings = c4.notes(text_jobs(shards))
    small = len([i for i in shards if i < 896])
    assert f"{small} of the 128 training files of llama31_8b (00768 to 00895), {len(shards)} of the 256" in found
    assert found.endswith(whole or "(to 01023)")
    assert [warning.split(";")[0] for warning in warnings] == (
        [] if whole else ["no benchmark's training set is whole"]
    )


def test_tokenized_files_and_validation_files_are_counted():
    def megatron(*names):
        return [c4.MegatronPart("train", name, (Path(f"{name}.bin"), Path(f"{name}.idx"))) for name in names]

    heldout = c4.MegatronPart("heldout", "validation", (Path(f"{c4.MEGATRON_HELD_OUT}.bin"), Path("x.idx")))
    first, second = c4.MEGATRON_TRAIN
    assert c4.notes([*megatron(first), heldout])[0].endswith("whole for llama31_8b")
    assert c4.notes([*megatron(first, second), heldout])[0].endswith("whole for llama31_8b and llama31_405b")
    found, warnings = c4.notes([*megatron(second), heldout])
    assert found == f"found 1 of 2 tokenized training files: {second}"
    assert len(warnings) == 1
    [warning] = c4.notes(text_jobs(range(768, 896), validation=7))[1]
    assert warning.startswith("7 of the 8 validation files")


def test_a_subset_is_built_with_a_warning(raw, tok_file, tmp_path, capsys):
    build("c4", raw, tok_file, tmp_path / "out", 1, quiet)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("found 5 of the 128 training files of llama31_8b")
    assert [line.split(":")[0] for line in lines[1:]] == ["warning", "warning"]
    assert "2 of the 8 validation files" in lines[2]


@pytest.mark.usefixtures("short")
def test_sequences_other_than_the_references_are_warned_of(tok_file, tmp_path, monkeypatch):
    raw = tmp_path / "packed"
    raw.mkdir()
    write_jsonl(raw / "train.jsonl", packed_rows(6, 3))
    write_jsonl(raw / "validation.jsonl", packed_rows(2, 4))
    said = []
    build("govreport", raw, tok_file, tmp_path / "out", 1, quiet, said.append)
    assert [line.split(":")[1] for line in said] == [
        " train has 6 sequences, the reference's 3,901", " heldout has 2 sequences, the reference's 173"
    ]  # fmt: skip
    monkeypatch.setattr(govreport, "REFERENCE_SEQUENCES", {"train": 6, "heldout": 2})
    build("govreport", raw, tok_file, tmp_path / "out", 1, quiet, said.append)
    assert len(said) == 2
