"""Devices that programs are made for, attached or not."""
