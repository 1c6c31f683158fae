"""The training step, validation, and the loop around them."""
