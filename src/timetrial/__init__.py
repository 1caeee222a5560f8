"""Timetrial: train, serve and predict the MLPerf workloads from one definition."""

__version__ = "0.1.0"
