"""Run folders in a bucket: upload of whole checkpoints, and download."""
