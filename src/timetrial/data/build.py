"""`timetrial data build` and `verify`: raw files -> a directory of token files, restartable.

Every part appears under its own name only when it is whole, followed by NAME.json that says what it
was made from; `meta.json` comes last. So the build can be killed at any moment: the same command
keeps the parts that are whole, throws the rest away and goes on, and the result is the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from timetrial.data import c4, dataset, govreport, tokenizer
from timetrial.data.job import Job, origin, size_of
from timetrial.data.progress import Console, Progress
from timetrial.data.tokenfile import (
    Meta,
    Part,
    TokenFiles,
    check_tokenizer,
    dtype_for,
    part_from,
    read_json,
    read_meta,
    write_meta,
)
from timetrial.data.tokenizer import Tokenizer
from timetrial.data.workers import run_all
from timetrial.errors import UserError

SOURCES: dict[str, Callable[[Path], list[Job]]] = {"c4": c4.jobs, "govreport": govreport.jobs}
Key = tuple[str, str]
"""(split, name) of a part."""


def build(
    source: str,
    input: Path | str,
    tokenizer_path: Path | str,
    out: Path | str,
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Meta]:
    """Make the token files of `source` and return what they are, by split.

    `progress` is called about once a second; by default it is a line on standard error. `say` is told
    how much of the official set there is, and warned where it is another; by default on standard error. Raises
    UserError, one line, for input that is missing or damaged, a tokenizer that cannot be read, a
    directory made with another one, a full disk, or a second build in the same directory.
    """
    directory, raw = Path(out), Path(input)
    if source not in SOURCES:
        raise UserError(f"cannot build {source!r}; there are {', '.join(SOURCES)} (sotu and synopses are bundled)")
    if not raw.is_dir():
        raise UserError(f"--input {raw} is no directory")
    tok = tokenizer.load(tokenizer_path)
    jobs = SOURCES[source](raw)
    say = say or _to_stderr
    if source == "c4":
        found, warnings = c4.notes(jobs)
        for line in (found, *(f"warning: {warning}" for warning in warnings)):
            say(line)
    rebuild = f"timetrial data build {source} --input {raw} --tokenizer {tokenizer_path} --out {directory}"
    with _sole_builder(directory):
        dataset.describe(directory, source, tok)
        for leftover in directory.glob("*/*.tmp"):
            leftover.unlink()
        done = _finished(directory, jobs, tok)
        if missing := [job for job in jobs if (job.split, job.name) not in done]:
            _make(directory, missing, list(done.values()), tok, workers, progress or Console())
            done = _finished(directory, jobs, tok)
        metas = {split: _complete(directory, split, source, jobs, done, tok, rebuild) for split in dataset.SPLITS}
    if source == "govreport":
        for split, expected in govreport.REFERENCE_SEQUENCES.items():
            if metas[split].documents != expected:
                say(
                    f"warning: {split} has {metas[split].documents:,} sequences, the reference's {expected:,}: not "
                    "the official set; a run on it is no MLPerf result"
                )
    return metas


def verify(path: Path | str, progress: Callable[[int, int], None] | None = None) -> dict[str, Meta]:
    """Read all token files of a directory made by `build`. Raises UserError naming the first altered one.

    `progress(bytes read, bytes in all)` is called for each split.
    """
    _, tok = dataset.read(Path(path))
    metas = {}
    for split in dataset.SPLITS:
        files = TokenFiles(Path(path) / split)
        check_tokenizer(files.meta, tok, files.directory)
        files.verify(progress)
        metas[split] = files.meta
    return metas


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _sole_builder(directory: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "build.lock").open("w")
    except OSError as error:
        raise UserError(f"--out {directory} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another build is writing {directory}; wait for it or choose another --out") from None
        yield
        (directory / "build.lock").unlink(missing_ok=True)


def _finished(directory: Path, jobs: list[Job], tok: Tokenizer) -> dict[Key, Part]:
    """Parts that are whole and made from the inputs as they are now.

    Raises UserError when there are parts that `jobs` do not make: another --input, it seems.
    """
    known = _known_parts(directory)
    wanted = {(job.split, job.name): job for job in jobs}
    for split, name in known:
        if (split, name) not in wanted:
            raise UserError(
                f"{directory / split} has part {name}, for which --input has no file; "
                "put the file back or choose another --out"
            )
    return {
        key: part
        for key, part in known.items()
        if part.origin == origin(wanted[key]) and _sizes_fit(directory / key[0], part, tok)
    }


def _known_parts(directory: Path) -> dict[Key, Part]:
    known: dict[Key, Part] = {}
    for split in dataset.SPLITS:
        with contextlib.suppress(UserError):  # none yet, or damaged: then its parts are made again
            known |= {(split, part.name): part for part in read_meta(directory / split).parts}
        for sidecar in (directory / split).glob("*.json"):
            if sidecar.name != "meta.json":
                with contextlib.suppress(UserError):
                    part = part_from(read_json(sidecar, ""))
                    known[split, part.name] = part
    return known


def _sizes_fit(folder: Path, part: Part, tok: Tokenizer) -> bool:
    width = dtype_for(tok.vocab_size).itemsize
    sizes = {"bin": width * part.tokens, "mask": part.tokens, "idx": 8 * (part.documents + 1)}
    files = {suffix: folder / f"{part.name}.{suffix}" for suffix in part.sha256}
    return all(path.exists() and path.stat().st_size == sizes[suffix] for suffix, path in files.items())


def _complete(
    directory: Path, split: str, source: str, jobs: list[Job], done: dict[Key, Part], tok: Tokenizer, rebuild: str
) -> Meta:
    mine = [job for job in jobs if job.split == split]
    parts = tuple(done[job.split, job.name] for job in mine)
    meta = Meta(source, tok.name, tok.sha256, tok.vocab_size, rebuild, parts, mine[0].seq_len)
    write_meta(directory / split, meta)
    for job in mine:
        (directory / split / f"{job.name}.json").unlink(missing_ok=True)
    return meta


def _make(
    directory: Path,
    missing: list[Job],
    done: list[Part],
    tok: Tokenizer,
    workers: int,
    show: Callable[[Progress], None],
) -> None:
    before = sum(file["bytes"] for part in done for file in part.origin["inputs"])
    total = before + sum(size_of(path) for job in missing for path in job.inputs)
    documents, tokens = sum(part.documents for part in done), sum(part.tokens for part in done)
    begin = time.monotonic()

    def tell(read: int, new_documents: int, new_tokens: int) -> None:
        elapsed = time.monotonic() - begin
        show(Progress(before + read, total, documents + new_documents, tokens + new_tokens, elapsed, before))

    run_all(directory, tok, missing, min(workers, len(missing)), tell)
