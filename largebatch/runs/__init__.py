"""The run folder: what a run writes, reads back and shows."""
