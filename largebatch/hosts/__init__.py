"""Processes and devices: start, agree, compare."""
