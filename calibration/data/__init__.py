"""Labels of queries and passages.

dataset            Dataset, Query; splits without a question in two parts
readers            BEIR folders, JSONL, TREC qrels and runs
label_files        the tables of a BEIR folder
text_files         lines and JSON objects of a file, with errors by line
golden             labels with provenance, adjudicated where they disagree
golden_sources     the files that a golden set is made from
frozen_sets        golden sets on disk, identified by a digest
coverage           the share of retrieved passages that have a label
hard_negatives     passages ranked high but labelled not relevant
"""
