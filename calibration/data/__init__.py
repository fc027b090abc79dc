"""Labels of queries and passages.

dataset            Dataset, Query; splits without a question in two parts
readers            BEIR folders and their tables, JSONL, TREC runs
text_files         JSONL, CSV and tables as records, with errors by line
questions          questions without labels, with what people graded of them
golden             golden sets on disk, identified by a digest
"""
