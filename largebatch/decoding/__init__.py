"""From an image file to pixels."""
