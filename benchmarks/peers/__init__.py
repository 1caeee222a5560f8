"""Timetrial and what it is compared with by `benchmarks/train_cpu.py`: one file a contestant, each a process."""
