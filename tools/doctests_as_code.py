"""A griffe extension: doctests become code, where Markdown would make quotations of them."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?=\S).*)*", re.MULTILINE)


class DoctestsAsCode(griffe.Extension):  # type: ignore[misc]
    """Puts fences around the doctests of every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Rewrite the docstring of one object before it is parsed."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
