"""Labels of queries and passages.

dataset            Dataset, Query; splits without a question in two parts
readers            BEIR folders and their tables, JSONL, TREC runs
text_files         JSONL, CSV and tables as records, with errors by line
golden             labels with provenance, adjudicated where they disagree
golden_sources     the files that a golden set is made from
frozen_sets        golden sets on disk, identified by a digest
coverage           the share of retrieved passages that have a label
hard_negatives     passages ranked high but labelled not relevant
"""
