"""From image files to examples on the devices."""
