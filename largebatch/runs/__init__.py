"""Run folders: their writers, readers and display."""
