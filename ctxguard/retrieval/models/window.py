"""The part of a passage that an embedding model reads; text past its window is not embedded."""

from functools import cache
from typing import Any

from ctxguard._support.extras import require


class PassageWindow:
    """The tokens that a model reads of a passage.

    Args:
        tokenizer: The content of the model's ``tokenizer.json``.
        tokens: Number of tokens that it reads, including those that it adds itself.
        prompt: Text that it puts before a passage.

    Attributes:
        tokens: As given.
    """

    def __init__(self, tokenizer: str, tokens: int, prompt: str = "") -> None:
        self._tokenizer: Any = require("tokenizers", "embedded").Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._prompt = prompt
        self.tokens = tokens
        self._splitter = cache(self._new_splitter)

    def is_longer(self, text: str) -> bool:
        """Tell whether the model does not read a text to its end."""
        return self._tokens_of(text) > self.tokens

    def split(self, text: str, heading: str = "") -> list[str]:
        """Split a text into chunks that fit the window, each with a heading before it.

        Chunks end at the end of a sentence, line or paragraph if they can. A heading longer than
        three quarters of the window leaves room for a quarter.

        Raises:
            MissingExtraError: the library that splits is not installed.
        """
        room = self.tokens - self._tokens_of(heading)
        chunks: list[str] = self._splitter(max(room, self.tokens // 4)).chunks(text)
        return chunks

    def _tokens_of(self, text: str) -> int:
        return len(self._tokenizer.encode(self._prompt + text).ids)

    def _new_splitter(self, capacity: int) -> Any:
        library = require("semantic_text_splitter", "chunk")
        return library.TextSplitter.from_huggingface_tokenizer(self._tokenizer, capacity)
