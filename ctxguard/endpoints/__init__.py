"""Models behind endpoints: one bounded HTTP client, and chat, decisions and reranking over it.

`http` sends a request and reads one answer; `replies` parses it; `failures` explains why there is
none; `forms` is the table of request formats. `chat`, `assessors` and `rerank` are the clients, and
`usage` their counts.
"""
