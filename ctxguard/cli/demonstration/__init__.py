"""The demonstration: its corpus, its labelled questions, and the whole loop on them."""
