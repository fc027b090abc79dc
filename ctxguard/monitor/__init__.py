"""Watching live traffic: sample, judge, estimate, export. All of it beside the request path."""
