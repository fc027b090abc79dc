"""The console's tests need the extra ``serve``."""

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("httpx2", reason="the extra `serve` is not installed")
pytest.importorskip("jinja2", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
