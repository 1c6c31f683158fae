"""What the networks of model.py are made of."""
