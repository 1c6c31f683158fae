"""Run folders in a bucket: copied there whole, and fetched from there."""
