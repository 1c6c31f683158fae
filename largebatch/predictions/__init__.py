"""What a network said of images, as files and tables."""
