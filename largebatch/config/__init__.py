"""The fields of a config: what is allowed, what identifies a run."""
