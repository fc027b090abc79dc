"""The embedded hybrid retriever, and the protocols of retrievers."""
