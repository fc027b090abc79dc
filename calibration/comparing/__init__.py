"""Ranking profiles side by side: candidates, paired differences, verdicts, kept runs."""
