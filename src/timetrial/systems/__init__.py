"""Hardware as data: accelerators, nodes and fabrics (`system.py`), and what kernels reach on them (`rates.py`)."""
