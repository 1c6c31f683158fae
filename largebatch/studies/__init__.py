"""Studies of many runs: search, queue, analysis."""
