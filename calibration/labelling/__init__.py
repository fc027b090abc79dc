"""Labels: read, merged with provenance, frozen, checked for coverage, mined and written."""
