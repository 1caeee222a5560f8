"""No rank waits for ever: who hangs is named, with the collective it was last in, and the job ends.

Each rank has a thread that writes its beat (`pulse.Beat`) into the job's store once a second, over a
connection of its own. When the main thread has stood still for `timeout_s`, in one collective or
anywhere else without computing, the thread reads the beats of all ranks twice, some seconds apart:

    a beat that did not change      that rank is stopped or gone: it is to blame
    else a rank that waits for none that one hangs in its own code, and its beat says where
    else                            the ranks wait for one another

One rank speaks for the job, the first to put its verdict into the store; then all end at once, and
whoever started them ends those that cannot. Nothing hangs on rank 0: `launch.run_local` and torchrun's
agent host the store. Where rank 0 hosts it (ranks started by hand) and stops, the others say that.

Time is counted in this rank's own readings, so that a machine that slept, or a job that was suspended
as a whole, has not waited meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn, TypeVar

from torch._C._distributed_c10d import Store

from timetrial.train.meeting import connect, part
from timetrial.train.pulse import Beat, Pulse, ranks_text

INTERVAL_S = 1.0
"""Between two beats, at most; a tenth of a short timeout."""
WINDOW_S = 15.0
"""How long a beat must stand still to count as none, at most; a quarter of a short timeout, and four beats."""
CONNECT_S = 5.0
"""How long one attempt to reach the store takes."""
ANSWER_S = 10.0
"""How long the store may think about one question; it reads the beats of thousands of ranks in less."""
STORE_S = 30.0
"""How long the store may be out of reach before a rank takes its launcher to be gone."""
T = TypeVar("T")
RESUME = "--resume goes on from the last checkpoint"


class Watchdog:
    """This rank's thread, in the start `name` of the job (`meeting.py`).

    `step` is set once there is a trainer: the optimizer step in work, from 1.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, name: str) -> None:
        self.name = name
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.interval_s = min(INTERVAL_S, timeout_s / 10)
        self.window_s = max(4 * self.interval_s, min(WINDOW_S, timeout_s / 4))
        self.step: Callable[[], int | None] = lambda: None
        self._state = "running"
        self._pulse = Pulse()
        self._stopping = threading.Event()
        self._beating = threading.Lock()  # a beat that is being written must not follow the last one
        self._store: Store | None = None
        self._launcher_speaks = False
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self, state: str = "ended") -> None:
        """Write the last beat; from now on this rank hangs nowhere."""
        with self._beating:
            if self._stopping.is_set():
                return
            self._state = state
            self._stopping.set()
            if self._store is not None:
                try:
                    self._beat(self._store)
                except RuntimeError:
                    return  # whoever hosts the store has ended already

    def lost(self) -> str | None:
        """Called when a collective failed because another rank is gone: what to say of it, or None to be silent.

        Takes as long as it takes to see whose beat stands still. Where a launcher speaks for the job, at once.
        """
        self._state = "lost"
        self._connected.wait(CONNECT_S)  # it may have been lost within this rank's first moments
        store = self._store
        if store is None:
            return f"rank {self.rank}: the connection to another rank was lost; {RESUME}"
        try:
            with self._beating:
                mine = self._beat(store)
            if self._launcher_speaks:
                return None
            before = read_beats(store, self.world_size)
            time.sleep(4 * self.interval_s)
            after = read_beats(store, self.world_size)
            if any(beat is not None and beat.state == "failed" for beat in after.values()):
                return None
            text = gone(self.rank, mine, before, after)
            return text if speak(store, self.rank, text) else None
        except RuntimeError:
            return f"rank {self.rank}: the connection to another rank and to the job's store was lost; {RESUME}"

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        waited, key, seen = 0.0, None, time.monotonic()
        before: dict[int, Beat | None] | None = None
        out_of_reach_s = 0.0
        while True:
            now = time.monotonic()
            passed, seen = now - seen, now
            slept = passed > max(5.0, 5 * self.interval_s)
            try:
                if self._store is None:
                    client = answered(lambda: connect(CONNECT_S))
                    self._launcher_speaks = answered(partial(client.check, [LAUNCHER_SPEAKS]))
                    self._store = part(client, self.name)
                    self._connected.set()
                with self._beating:
                    if self._stopping.is_set():
                        return
                    beat = self._beat(self._store)
                out_of_reach_s = 0.0
                stands = self._pulse.key is not None and self._pulse.key == key and not slept
                key = self._pulse.key
                waited = waited + passed if stands else 0.0
                if waited < self.timeout_s - self.window_s:
                    before = None
                elif before is None:
                    before = answered(partial(read_beats, self._store, self.world_size))
                elif waited >= self.timeout_s:
                    after = answered(partial(read_beats, self._store, self.world_size))
                    text = judge(self.rank, beat, waited, self.timeout_s, before, after)
                    first = answered(partial(speak, self._store, self.rank, text))
                    self._end(text if first and not self._launcher_speaks else "")
            except RuntimeError as error:  # of the store
                self._store = None
                out_of_reach_s += time.monotonic() - now + self.interval_s
                if out_of_reach_s > STORE_S and not self._stopping.is_set():
                    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                    self._end(
                        f"rank {self.rank}: no answer from the job's store at {where} for {out_of_reach_s:.0f} s; the "
                        f"launcher, or rank 0 where there is none, hangs or is gone ({str(error).splitlines()[0]})"
                    )
            if self._stopping.wait(self.interval_s):
                return

    def _beat(self, store: Store) -> Beat:
        beat = self._pulse.read(self.step(), self._state)
        store.set(f"beat/{self.rank}", beat.dumps())
        return beat

    def _end(self, text: str) -> NoReturn:
        if text:
            say(text)
        os._exit(1)  # the main thread cannot be woken


# ---- the store -----------------------------------------------------------------------------------


def answered(ask: Callable[[], T]) -> T:
    """`ask()` of the store. Raises RuntimeError when its host is stopped: the store's client would wait for ever."""
    answer: list[T] = []
    error: list[RuntimeError] = []

    def work() -> None:
        try:
            answer.append(ask())
        except RuntimeError as raised:
            error.append(raised)

    thread = threading.Thread(target=work, name="watchdog-asks", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if answer:
        return answer[0]
    raise error[0] if error else RuntimeError("it is reached and says nothing")


def read_beats(store: Store, world_size: int) -> dict[int, Beat | None]:
    """The newest beat of every rank; None of one that has not come yet."""
    keys = {rank: f"beat/{rank}" for rank in range(world_size)}
    return {rank: Beat.loads(store.get(key)) if store.check([key]) else None for rank, key in keys.items()}


LAUNCHER_SPEAKS = "timetrial/launcher speaks"
"""Key that a launcher sets, in no start's part, which prints the job's last line itself."""


def speak(store: Store, rank: int, text: str) -> bool:
    """Put the job's verdict into the store; whether this rank was the first."""
    mine = f"{rank} {text}".encode()
    return bytes(store.compare_set("verdict", "", mine.decode())) == mine


def verdict(store: Store) -> str | None:
    """What a rank has put there."""
    if not store.check(["verdict"]):
        return None
    return bytes(store.get("verdict")).decode().partition(" ")[2]


def say(text: str) -> None:
    """The job's last line on stderr, below what a live display left there."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")  # its line and hidden cursor
    print(f"error: {text}", file=sys.stderr, flush=True)


# ---- who is to blame -----------------------------------------------------------------------------


def judge(
    rank: int,
    mine: Beat,
    waited_s: float,
    timeout_s: float,
    before: Mapping[int, Beat | None],
    after: Mapping[int, Beat | None],
) -> str:
    """One line that names who keeps `rank` waiting, from two readings of all ranks' beats."""
    tail = f"ended after --timeout {timeout_s:g} s; {RESUME}"
    absent = [r for r, beat in after.items() if beat is None]
    if absent:
        return f"{ranks_text(absent)} did not come: no sign of life for {waited_s:.0f} s; {tail}"
    beats = {r: beat for r, beat in after.items() if beat is not None}
    silent = _silent(rank, before, beats)
    if silent:
        hang = "hangs" if len(silent) == 1 else "hang"
        return f"{ranks_text(silent)} {hang}: no sign of life for {waited_s:.0f} s, {last_of(silent[0], after)}; {tail}"
    over = [r for r, beat in beats.items() if beat.state == "ended"]
    if over:
        return f"{ranks_text(over)} ended, {last_of(over[0], after)}, and others wait for it; {tail}"
    busy = [r for r, beat in beats.items() if not (mine if r == rank else beat).waits]
    if busy:
        first = beats[busy[0]]
        hang = "hangs" if len(busy) == 1 else "hang"
        at = f" in {first.place}" if first.place else ""
        waiting = [r for r in beats if r not in busy]
        wait = "wait" if len(waiting) > 1 else "waits"
        others = f" while {ranks_text(waiting)} {wait} {_where(beats[waiting[0]])}" if waiting else ""
        return f"{ranks_text(busy)} {hang}{at} for {waited_s:.0f} s, {last_of(busy[0], after)}{others}; {tail}"
    places: dict[str, list[int]] = {}
    for r, beat in beats.items():
        places.setdefault(_where(beat), []).append(r)
    each = ", ".join(f"{ranks_text(ranks)} {where}" for where, ranks in places.items())
    return f"the ranks wait for one another for {waited_s:.0f} s: {each}; {tail}"


def gone(rank: int, mine: Beat, before: Mapping[int, Beat | None], after: Mapping[int, Beat | None]) -> str:
    """One line for a lost connection: whose beat stands still, or that nobody's does."""
    silent = _silent(rank, before, {r: beat for r, beat in after.items() if beat is not None})
    if not silent:
        return f"rank {rank}: the connection to another rank was lost, {last_of(rank, {rank: mine})}; {RESUME}"
    verb = "is" if len(silent) == 1 else "are"
    return f"{ranks_text(silent)} {verb} gone, {last_of(silent[0], after)}; {RESUME}"


def last_of(rank: int, beats: Mapping[int, Beat | None]) -> str:
    """The last collective of a rank that hangs or died: of its last beat, or a later one that others were in with it.

    That is one that is over, or the one that failed when the rank died.
    """
    own = beats.get(rank)
    known = [(own.last, own)] if own is not None and own.last else []
    for other, beat in beats.items():
        shared = (beat.last if beat.state == "lost" else beat.done) if beat is not None and other != rank else None
        if beat is not None and shared is not None and rank in shared.ranks and all(shared != c for c, _ in known):
            known.append((shared, beat))
    if not known:
        return "before its first collective"
    collective, beat = max(known, key=lambda pair: pair[0].at)
    return f"last in {collective}{_step(beat)}"


def _silent(rank: int, before: Mapping[int, Beat | None], after: Mapping[int, Beat]) -> list[int]:
    """Ranks whose beat has not changed although they have not ended."""
    silent = []
    for r, beat in after.items():
        old = before.get(r)
        if r != rank and beat.state in ("running", "lost") and old is not None and old.count == beat.count:
            silent.append(r)
    return silent


def _step(beat: Beat) -> str:
    return f" (step {beat.step})" if beat.step else ""


def _where(beat: Beat) -> str:
    if beat.waiting is not None:
        return f"in {beat.waiting}"
    return f"for a message at {beat.place}" if beat.place else "for other ranks"
