"""The labels of people on sampled passages, their files, and judged samples as rows."""
