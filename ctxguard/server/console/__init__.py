"""Serves the console: three pages on the sampled requests, or only the grading of questions.

routes     console_routes and label_routes, which a Starlette application mounts
sessions   signing in and out, and refusing what other sites send
pages      answers as pages, errors included
decisions  what was served and dropped, and why; the requests of a day that lost relevant passages
grading    the grading screen
label      the grading screen on sampled requests
"""
