"""Decoders from image files to pixels."""
