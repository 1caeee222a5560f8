"""Ranks of a small world, and the one rank they are compared with, each compute on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_two_threads: None) -> None:
    """On a few tokens a second thread costs more than it does."""
    torch.set_num_threads(1)
