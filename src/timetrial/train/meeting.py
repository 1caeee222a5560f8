"""Where the ranks of one start of the job meet: a part of the store that no earlier start has written to.

torchrun's agents keep their store when they start the ranks again, addresses of the dead ones included, and
torch then connects to those ("Gloo connectFullMesh failed ... Connection refused"). Their count of restarts
does not help: each node's agent counts its own failures only. So rank 0 names each start anew, and every
rank asks it for the name with a word of its own:

    rank r   sets hello/r = its word, waits for welcome/<its word>
    rank 0   answers each new word that it finds with the name of this start, until all have met

What an earlier start left behind is answered, too, and nobody reads that.
"""

from __future__ import annotations

import datetime
import os
import threading
import uuid

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from timetrial.errors import RunFailed

POLL_S = 0.05
CURRENT = "timetrial/current"
"""Key of the newest start's name."""


def connect(timeout_s: float) -> Store:
    """A connection of its own to the job's store: one that waits for a key lets nobody else use it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def part(store: Store, name: str) -> Store:
    """The keys of the start `name`."""
    return PrefixStore(f"timetrial/{name}", store)


def newest(store: Store) -> Store | None:
    """The keys of the newest start, for whoever hosts the store; None when rank 0 has not come."""
    return part(store, store.get(CURRENT).decode()) if store.check([CURRENT]) else None


class Meeting:
    """`with Meeting(...) as meeting:` around making the process group in `meeting.store`."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size = rank, world_size
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        word = uuid.uuid4().hex
        client = connect(timeout_s)
        if rank == 0:
            self.name = word
            client.set(CURRENT, word)
            self._thread = threading.Thread(target=self._welcome, args=(connect(timeout_s),), daemon=True)
            self._thread.start()
        else:
            client.set(f"timetrial/hello/{rank}", word)
            try:
                self.name = client.get(f"timetrial/welcome/{word}").decode()
            except RuntimeError as error:
                raise RunFailed(f"rank 0 did not come: no sign of life for {timeout_s:g} s") from error
        self.store = part(client, self.name)

    def _welcome(self, store: Store) -> None:
        answered: dict[int, bytes] = {}
        while not self._over.wait(POLL_S):
            for rank in range(1, self._world_size):
                key = f"timetrial/hello/{rank}"
                word = store.get(key) if store.check([key]) else None
                if word is not None and answered.get(rank) != word:
                    store.set(f"timetrial/welcome/{word.decode()}", self.name)
                    answered[rank] = word

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
