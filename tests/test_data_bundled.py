"""The bundled text, its tokenizer and the samples cut from it."""

import hashlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from timetrial.config import Data
from timetrial.data import bundled, tokenizer
from timetrial.data.source import open_source
from timetrial.errors import UserError


def test_addresses_are_whole_and_in_order_of_year():
    docs = bundled.documents("sotu")
    assert len(docs) == 233
    assert sum(len(d.text) for d in docs) == bundled.sources()["sotu"]["characters"] == 10_760_042
    assert docs[0].name == "1790_george_washington_n"
    assert docs[-1].name == "2021_joseph_r_biden_d"
    assert docs[0].text.startswith("Fellow-Citizens of the Senate and House of Representatives")
    assert [d.name for d in docs] == sorted(d.name for d in docs)


def test_every_collection_has_its_licence_and_both_checksums():
    for name, entry in bundled.sources().items():
        packed = (bundled.directory() / entry["file"]).read_bytes()
        assert hashlib.sha256(packed).hexdigest() == entry["sha256"], name
        assert hashlib.sha256(lzma.decompress(packed)).hexdigest() == entry["uncompressed_sha256"], name
        assert len((bundled.directory() / entry["licence_file"]).read_text(encoding="utf-8")) > 500, name


def test_damaged_text_is_named(tmp_path, monkeypatch):
    packed = bytearray((bundled.directory() / "sotu.jsonl.xz").read_bytes())
    packed[len(packed) // 2] ^= 1
    (tmp_path / "sotu.jsonl.xz").write_bytes(packed)
    (tmp_path / "sources.json").write_text(json.dumps(bundled.sources()))
    monkeypatch.setattr(bundled, "directory", lambda: tmp_path)
    bundled._rows.cache_clear()
    with pytest.raises(UserError, match=r"sotu\.jsonl\.xz is damaged.*reinstall"):
        bundled.documents("sotu")
    (tmp_path / "sotu.jsonl.xz").unlink()
    with pytest.raises(UserError, match=r"sotu\.jsonl\.xz cannot be read"):
        bundled.documents("sotu")


def test_every_twentieth_document_is_held_out():
    docs = bundled.documents("sotu")
    train, heldout = bundled.split(docs)
    assert [docs.index(d) for d in heldout] == list(range(10, 233, 20))
    assert not {d.name for d in train} & {d.name for d in heldout}
    assert len(train) + len(heldout) == 233


def test_shipped_tokenizer_is_what_training_gives_bit_for_bit():
    train, _ = bundled.split(bundled.documents("sotu"))
    shipped = (bundled.directory() / "sotu-2048.tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer.train([d.text for d in train], 2048) == shipped


def test_tokenizer_loses_nothing_and_keeps_its_reserved_ids():
    tok = tokenizer.bundled_tokenizer()
    assert tok.vocab_size == 2048
    assert tok.backend.id_to_token(tok.bos_id) == tokenizer.BOS
    assert tok.backend.id_to_token(tok.eos_id) == tokenizer.EOS
    for text in ("Fellow citizens,\n\nof the Senate", "naïve — “quoted” 漢字 \x02", ""):
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert ids.dtype == np.int64
        assert not np.isin(ids, [tok.bos_id, tok.eos_id]).any()


def test_other_vocabulary_size_is_trained_on_demand():
    text = tokenizer.train(["the cat sat on the mat " * 50], 270)
    tok = tokenizer.Tokenizer("x", text, eos_id=1)
    assert tok.vocab_size == 270
    assert len(tok.encode("the cat")) < len("the cat")
    with pytest.raises(UserError, match="at least 258"):
        tokenizer.train(["a"], 100)


def test_tokenizer_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        tokenizer.load(tmp_path / "none.json")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(UserError, match="not a Hugging Face tokenizer"):
        tokenizer.load(tmp_path)
    broken.write_text(tokenizer.bundled_tokenizer().json.replace("end_of_text", "finis"))
    with pytest.raises(UserError, match="no end-of-text token"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|finis|>"}}))
    assert tokenizer.load(Path(tmp_path)).eos_id == 1


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
def test_sotu_samples_are_consecutive_windows_with_the_next_token_as_label():
    source = open_source(Data(source="sotu", seq_len=256, tokenizer="sotu-2048"))
    tok, (train, heldout) = source.tokenizer, bundled.split(bundled.documents("sotu"))
    for samples, docs in ((source.train, train), (source.heldout, heldout)):
        stream = []
        for d in docs[:3]:
            stream += [*tok.backend.encode(d.text).ids, tok.eos_id]
        for i in (0, 1, len(stream) // 256 - 1):
            sample = samples[i]
            assert sample["tokens"].tolist() == stream[i * 256 : i * 256 + 256]
            assert sample["labels"].tolist() == stream[i * 256 + 1 : i * 256 + 257]
            assert sample["tokens"].dtype == sample["labels"].dtype == np.int64
        with pytest.raises(IndexError):
            samples[len(samples)]
    assert source.vocab_size == 2048
    assert (len(source.train), len(source.heldout)) == (10_927, 524)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"unknown data source 'sotus'.*sotu"):
        open_source(Data(source="sotus"))
    with pytest.raises(UserError, match="unknown bundled tokenizer 'gpt2'"):
        open_source(Data(source="sotu", tokenizer="gpt2"))
