"""Training and validation data on the devices."""
