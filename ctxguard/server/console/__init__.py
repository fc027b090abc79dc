"""The console: three pages on the sampled requests, served beside the HTTP endpoints.

routes     console_routes, which a Starlette application mounts
sessions   signing in and out, and refusing what other sites send
pages      answers as pages, errors included
decisions  what was served and dropped, and why; the requests of a day that lost relevant passages
label      grading passages
queue      which request is graded next
"""
