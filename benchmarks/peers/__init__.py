"""What bench.py times beside ours: minimal.py and PyTorch."""
