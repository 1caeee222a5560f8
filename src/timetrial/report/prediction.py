"""A prediction as people and programs read it: `Answered`, and its terminal text, its JSON and its page.

`perfetto.py` writes the step as a trace.
"""

from __future__ import annotations

from timetrial.report.prediction_json import as_json
from timetrial.report.prediction_page import page, write_page
from timetrial.report.prediction_record import Answered, PublishedRun, Scaled
from timetrial.report.prediction_text import text

__all__ = ["Answered", "PublishedRun", "Scaled", "as_json", "page", "text", "write_page"]
