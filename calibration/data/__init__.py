"""Labels of queries and passages.

dataset            Dataset, Query; splits without a question in two parts
readers            BEIR folders and their tables, JSONL, TREC runs
documents          folders of Markdown, text, HTML, PDF, Office and CSV files as passages
text_files         JSONL, CSV and tables as records, with errors by line
label_check        whether labels belong to an index
golden             golden sets on disk, identified by a digest
"""
