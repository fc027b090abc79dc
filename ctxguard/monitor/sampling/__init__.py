"""From a request to a stored sample: selection, record, redaction, writing."""
