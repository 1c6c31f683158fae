"""Many runs: search, queue, analysis."""
