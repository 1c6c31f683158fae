"""Processes and devices: start, collectives, comparison."""
