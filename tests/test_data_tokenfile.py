"""Token files: what is written is read, and nothing damaged passes."""

import json
import resource

import numpy as np
import pytest

from timetrial.data.samples import ArrayTokens, PackedSamples, StreamSamples
from timetrial.data.tokenfile import Meta, PartWriter, TokenFiles, check_tokenizer, write_meta
from timetrial.data.tokenizer import bundled_tokenizer
from timetrial.errors import UserError

REBUILD = "timetrial data build c4 --input raw --tokenizer t --out here"


def store(directory, parts, vocab_size=2048, masked=False, seq_len=None):
    """Write parts, each a list of documents, each a list of ids."""
    written = []
    for i, documents in enumerate(parts):
        writer = PartWriter(directory, f"{i:05d}", vocab_size, masked)
        for ids in documents:
            writer.add(np.array(ids), np.array(ids) % 2 == 0 if masked else None)
        written.append(writer.finish())
    write_meta(directory, Meta("test", "tok", "0" * 64, vocab_size, REBUILD, tuple(written), seq_len))
    return TokenFiles(directory)


PARTS = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10], [11, 12, 13]]]


@pytest.mark.parametrize(("vocab_size", "width"), [(2048, 2), (65_536, 2), (65_537, 4), (128_256, 4)])
def test_parts_read_as_one_row(tmp_path, vocab_size, width):
    files = store(tmp_path, PARTS, vocab_size)
    assert (tmp_path / "00000.bin").stat().st_size == 4 * width
    row = np.arange(1, 14)
    for start in range(14):
        for stop in range(start, 14):
            assert files.read(start, stop).tolist() == row[start:stop].tolist()
    assert files.read(0, 13).dtype == np.int64
    assert files.document(2, 1).tolist() == [11, 12, 13]
    assert (files.meta.documents, files.meta.tokens, len(files)) == (5, 13, 13)
    with pytest.raises(IndexError, match="tokens 5:14 of 13"):
        files.read(5, 14)
    files.verify()


def test_largest_id_survives(tmp_path):
    assert store(tmp_path, [[[65_535]]], 65_536).read(0, 1).tolist() == [65_535]
    assert store(tmp_path / "wide", [[[128_255]]], 128_256).read(0, 1).tolist() == [128_255]


def test_stream_samples_over_parts_equal_those_of_memory(tmp_path):
    files, memory = store(tmp_path, PARTS), ArrayTokens(np.arange(1, 14))
    for seq_len in (1, 3, 4, 12):
        here, there = StreamSamples(files, seq_len), StreamSamples(memory, seq_len)
        assert len(here) == len(there) == 12 // seq_len
        for i in range(len(here)):
            assert {k: v.tolist() for k, v in here[i].items()} == {k: v.tolist() for k, v in there[i].items()}
    assert StreamSamples(memory, 4)[1]["tokens"].tolist() == [5, 6, 7, 8]
    assert StreamSamples(memory, 4)[1]["labels"].tolist() == [6, 7, 8, 9]
    assert len(StreamSamples(memory, 13)) == 0  # the last token would have no label


def test_packed_samples_mask_labels_and_never_look_past_their_end(tmp_path):
    files = store(tmp_path, [[[1, 2, 3, 4], [5, 6, 8, 10]]], masked=True, seq_len=4)
    samples = PackedSamples(files, 4)
    assert len(samples) == 2
    assert samples[0]["labels"].tolist() == [2, -100, 4, -100]
    assert samples[1]["tokens"].tolist() == [5, 6, 8, 10]
    assert samples[1]["labels"].tolist() == [6, 8, 10, -100]


@pytest.mark.parametrize("name", ["00001.bin", "00002.idx"])
def test_damage_names_the_file_and_the_way_back(tmp_path, name):
    files = store(tmp_path, PARTS)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"{name} has .* bytes, not .*; remove .* and run: {REBUILD}"):
        TokenFiles(tmp_path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    TokenFiles(tmp_path)  # same size: only reading everything finds it
    with pytest.raises(UserError, match=rf"{name} was altered: its sha256 differs.*{REBUILD}"):
        files.verify()
    path.unlink()
    with pytest.raises(UserError, match=rf"{name}: No such file or directory.*{REBUILD}"):
        TokenFiles(tmp_path)


def test_meta_guards_itself(tmp_path):
    store(tmp_path, PARTS)
    path = tmp_path / "meta.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "vocab_size": 70_000}))
    with pytest.raises(UserError, match=r"meta\.json was altered; make it with: timetrial data build"):
        TokenFiles(tmp_path)
    path.write_text(json.dumps(values)[:-20])
    with pytest.raises(UserError, match=r"meta\.json is damaged"):
        TokenFiles(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"meta\.json: No such file.*timetrial data build"):
        TokenFiles(tmp_path)


def test_other_format_version_is_refused(tmp_path):
    from timetrial.data.tokenfile import FORMAT, write_json

    write_json(tmp_path / "meta.json", {"format": FORMAT, "version": 99, "parts": []})
    with pytest.raises(UserError, match="format version 99, this program reads 1"):
        TokenFiles(tmp_path)


def test_wrong_tokenizer_is_named(tmp_path):
    files = store(tmp_path, PARTS)
    with pytest.raises(UserError, match=r"made with tokenizer tok .sha256 000000000000., not with sotu-2048"):
        check_tokenizer(files.meta, bundled_tokenizer(), tmp_path)


def test_full_disk_is_one_line_and_leaves_no_part(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = PartWriter(tmp_path, "00000", 2048)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        with pytest.raises(UserError, match=r"no space left for .*00000\.bin; free some space"):
            writer.add(np.zeros(1 << 22, dtype=np.int64))
        writer.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file.* cannot be written"):
        PartWriter(tmp_path / "file", "00000", 2048)
