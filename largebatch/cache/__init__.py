"""Decoded images on disk."""
