"""Predictions of a network, as files of a run folder and as tables and pictures."""
