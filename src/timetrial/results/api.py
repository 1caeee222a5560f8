"""What `timetrial.results` has that is no other module's: scoring in one call."""

from __future__ import annotations

from pathlib import Path

from timetrial.results.many import score_all
from timetrial.results.records import Result


def score(*paths: str | Path, round_: str = "", official: bool = False, workers: int = 1) -> list[Result]:
    """Every result under `paths`, in the order of the tree: logs, run directories, benchmark directories, whole trees.

    `round_` (`v5.0`) overrides what the tree says; `official` asks the official checker about each log too. What
    cannot be read is a result with the verdict `unread`. Raises UserError for a path that does not exist, an unknown
    round or no worker. `score_all` gives them one by one; `timetrial.report.score_json.as_json` writes them.
    """
    return list(score_all([Path(path) for path in paths], workers, None, round_, official))
