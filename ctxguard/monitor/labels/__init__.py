"""The labels of people on sampled passages, and the files in which they label them."""
