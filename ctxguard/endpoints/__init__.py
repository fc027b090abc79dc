"""Models behind endpoints: one bounded HTTP client, and chat, decisions and reranking over it.

`http` sends a request and reads one answer; `replies` reads its document; `failures` says in words
why there is none; `forms` is the table of what is spoken. `chat`, `assessors` and `rerank` are the
clients, and `usage` their counts.
"""
