"""What `bench.py` measures, one command a file."""
