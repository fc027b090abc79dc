"""One request: its input, the profile it is answered by, the context built, what is counted."""
