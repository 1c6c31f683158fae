"""What bench.py times beside ours: the seed's loop, a flax-style loop, PyTorch."""
