"""Predict: what a run would cost on a machine that one does not have, from the code that would run there."""
