"""The guard takes a request from its input to its context, and reloads files that change.

retrieve (``wrapped_retriever``) → decide → ask (``assess``) → build (``build_context``) → account
(``telemetry``, ``observers``), by the ``bound_profile`` in force; ``context_guard`` is its face.
"""
