"""Holds the index that a hybrid retriever searches: passages, postings, vectors and files."""
