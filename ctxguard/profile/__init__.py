"""Defines the profile: the file that calibration writes and the guard loads."""
