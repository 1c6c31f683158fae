"""A trained network as a folder that others can use without this project."""
