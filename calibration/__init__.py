"""Offline calibration: from labels to a profile. Imports ctxguard; its core never imports this."""
