"""A process that scores entries: on standard input come pickled pairs of an entry and whether the official checker
is asked, to standard output go pickled results.

Started by `many.py` alone; ends when its input does.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys

from timetrial.results.official import Official
from timetrial.results.scored import score_entry


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    gc.set_threshold(100_000, 20, 100)  # events are many and hold no cycles: looking for some takes a fifth of the time
    with os.fdopen(os.dup(1), "wb") as results, Official() as official:
        os.dup2(2, 1)  # whatever prints must not go between the results
        while True:
            try:
                entry, asked = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            result = score_entry(entry, official=official if asked else None)
            pickle.dump(result, results, pickle.HIGHEST_PROTOCOL)
            results.flush()


if __name__ == "__main__":
    main()
