"""Optimizers, schedules, batch sizes, and the noise of the gradient."""
