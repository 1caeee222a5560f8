"""Tokenizers: the bundled byte-level BPE, and any Hugging Face `tokenizer.json`.

The bundled one is a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909, on the bytes of GPT-2's
pre-tokenizer) trained on the training documents of `sotu` alone. Its trainer has no randomness, so
the same text and size give the same file bit for bit; 2,048 tokens are shipped, other sizes take
about two seconds to train. A `Tokenizer` knows its sha256, and token files remember it: ids of
another tokenizer would train without an error and mean nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from timetrial.data import bundled
from timetrial.errors import UserError

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
"""Reserved ids 0 and 1 of the bundled tokenizers."""

KNOWN: dict[str, tuple[int, dict[str, int]]] = {
    "llama-3.1-8b": (128_256, {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}),
    "mixtral-8x22b": (32_000, {"<s>": 1, "</s>": 2, "\u2581the": 272}),
    "llama-2": (32_000, {"<s>": 1, "</s>": 2, "\u2581the": 278}),
}
"""Tokenizers that the workloads ask for, known by their size and some of their ids."""

_END_TOKENS = (EOS, "</s>", "<|endoftext|>", "<|eos|>")
_BEGIN_TOKENS = (BOS, "<s>")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its identity. Pickles by its JSON, so worker processes can take it."""

    name: str
    json: str
    """The whole tokenizer.json."""
    eos_id: int
    """The token that ends every document."""
    bos_id: int | None = None
    """The token that begins a text, for sources that use one."""

    @property
    def sha256(self) -> str:
        """Of the JSON text."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object."""
        return _backend(self.json)

    @property
    def vocab_size(self) -> int:
        """Ids in use, reserved tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of one text, int64, without special tokens."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` for many texts, in parallel where the library may."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int64) for e in encodings]

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


@lru_cache(maxsize=4)
def _backend(text: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(text)


def train(texts: list[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE with `vocab_size` ids, BOS and EOS being 0 and 1."""
    smallest = 256 + 2
    if vocab_size < smallest:
        raise UserError(f"tokenizer of {vocab_size} tokens: a byte-level one needs at least {smallest}")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model.to_str()


def bundled_tokenizer(vocab_size: int = 2048) -> Tokenizer:
    """The tokenizer `sotu-VOCAB`: shipped where the package has it, else trained now (seconds)."""
    return _bundled(vocab_size)


@lru_cache(maxsize=4)
def _bundled(vocab_size: int) -> Tokenizer:
    shipped = bundled.directory() / f"sotu-{vocab_size}.tokenizer.json"
    if shipped.is_file():
        text = shipped.read_text(encoding="utf-8")
    else:
        documents, _ = bundled.split(bundled.documents("sotu"))
        text = train([d.text for d in documents], vocab_size)
    return Tokenizer(f"sotu-{vocab_size}", text, eos_id=1, bos_id=0)


def load(path: str | Path, name: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of the Hugging Face directory that holds one.

    The end token is the one `tokenizer_config.json` names, if that file lies beside it, else the
    usual ones are looked for. Raises UserError when the file or its end token is missing.
    """
    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    try:
        text = file.read_text(encoding="utf-8")
        backend = _backend(text)
    except OSError as error:
        raise UserError(f"tokenizer {file}: {error.strerror}; give a tokenizer.json or its directory") from None
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"tokenizer {file} is not a Hugging Face tokenizer.json: {error}") from None
    named = _config_tokens(file.with_name("tokenizer_config.json"))
    eos = _token_id(backend, (named.get("eos_token"), *_END_TOKENS))
    bos = _token_id(backend, (named.get("bos_token"), *_BEGIN_TOKENS))
    if eos is None:
        raise UserError(f"tokenizer {file} has no end-of-text token; put its tokenizer_config.json beside it")
    return Tokenizer(name or file.resolve().parent.name, text, eos_id=eos, bos_id=bos)


def check_known(tokenizer: Tokenizer, wanted: str, where: str) -> None:
    """Raises UserError when `tokenizer` is not the one a workload asks for by name."""
    if wanted in KNOWN:
        size, ids = KNOWN[wanted]
        fits = tokenizer.vocab_size == size and all(tokenizer.backend.token_to_id(t) == i for t, i in ids.items())
    else:
        fits = wanted in ("", tokenizer.name, tokenizer.sha256)
    if not fits:
        raise UserError(
            f"{where} was made with tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} ids), "
            f"not with {wanted}; build it again with that one"
        )


def _config_tokens(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    tokens = {key: values.get(key) for key in ("eos_token", "bos_token")}
    return {key: t["content"] if isinstance(t, dict) else t for key, t in tokens.items() if t}


def _token_id(backend: tokenizers.Tokenizer, candidates: tuple[str | None, ...]) -> int | None:
    ids = (backend.token_to_id(token) for token in candidates if token)
    return next((i for i in ids if i is not None), None)
