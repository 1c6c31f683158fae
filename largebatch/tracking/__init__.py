"""Trackers that report a run to tools outside of its folder."""
