"""Checks before a long run."""
