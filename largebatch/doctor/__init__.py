"""Doctor: checks before a long run."""
