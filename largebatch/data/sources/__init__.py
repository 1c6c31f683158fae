"""Sources of images, their classes and their splits."""
