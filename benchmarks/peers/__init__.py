"""What bench.py times beside ours: minimal.py, a flax-style loop, PyTorch."""
