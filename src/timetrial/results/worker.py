"""A process that scores entries: pickled entries come on standard input, pickled results go to standard output.

Started by `many.py` alone; ends when its input does.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys

from timetrial.results.scored import score_entry


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    gc.set_threshold(100_000, 20, 100)  # events are many and hold no cycles: looking for some takes a fifth of the time
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # whatever prints must not go between the results
        while True:
            try:
                entry = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(score_entry(entry), results, pickle.HIGHEST_PROTOCOL)
            results.flush()


if __name__ == "__main__":
    main()
