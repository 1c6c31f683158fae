"""Which images there are, of which class and split."""
