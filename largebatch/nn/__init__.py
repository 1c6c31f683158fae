"""Building blocks of the networks of model.py."""
