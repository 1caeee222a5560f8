"""The minis' first losses are what they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from timetrial.workloads.workload import names

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

from make import losses  # noqa: E402


@pytest.mark.parametrize("workload", names())
def test_first_losses(workload):
    golden = json.loads((GOLDEN / f"{workload}.json").read_text())
    # float32 products round differently on other processors; a wrong step shows from 1e-3 on
    assert losses(workload) == pytest.approx(golden, rel=1e-4)
