"""The index that a hybrid retriever searches: passages, postings, vectors, and their files."""
