"""What the scripts share, by subject; docs/architecture.md says what may import what."""
