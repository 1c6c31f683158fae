"""What report.py shows: panels of data, drawn on an HTML page or as PNG."""
