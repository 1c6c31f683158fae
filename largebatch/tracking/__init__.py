"""What is told of a run to tools outside of its folder."""
