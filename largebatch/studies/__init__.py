"""Many runs: search, queue, packing, analysis."""
