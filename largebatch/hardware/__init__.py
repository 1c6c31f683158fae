"""Devices that programs are made for, here or elsewhere."""
