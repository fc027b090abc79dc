"""Cheap text features of a candidate: lengths, query-term coverage, overlap with better ones."""

from collections.abc import Callable, Mapping

import numpy as np

from calibration.replay import Pools
from ctxguard.core.types import FloatArray, Passage
from ctxguard.retrieval.analysers.english import ENGLISH

TEXT_FEATURES = (
    "log_query_words",
    "log_passage_words",
    "coverage",
    "title_coverage",
    "new_coverage",
    "overlap_with_top",
    "overlap_with_better",
)


def text_features(
    pools: Pools, query_texts: Mapping[str, str], passage: Callable[[str], Passage]
) -> FloatArray:
    """The text features of every candidate, in the order of ``TEXT_FEATURES``.

    ``coverage`` is the share of the query's distinct words that the passage holds (its title:
    ``title_coverage``); ``new_coverage`` counts only words that no better candidate holds. The
    overlaps are Jaccard similarities of word sets, with the best candidate and the largest with
    any better one.

    Returns:
        Shape (n_q, depth, n_features), NaN beyond a pool's end.
    """
    from scipy.sparse import csr_matrix

    words: dict[str, int] = {}
    body: dict[str, frozenset[int]] = {}
    title: dict[str, frozenset[int]] = {}

    def numbered(text: str) -> frozenset[int]:
        return frozenset([words.setdefault(word, len(words)) for word in ENGLISH.analyse(text)])

    for passage_id in {passage_id for ids in pools.passage_ids for passage_id in ids}:
        found = passage(passage_id)
        body[passage_id] = numbered(f"{found.title} {found.text}")
        title[passage_id] = numbered(found.title)
    queries = [numbered(query_texts[query_id]) for query_id in pools.query_ids]
    table = np.full((len(pools), pools.scores.shape[1], len(TEXT_FEATURES)), np.nan)
    for row, (asked, ids) in enumerate(zip(queries, pools.passage_ids, strict=True)):
        n = len(ids)
        if n == 0:
            continue
        sets = [body[passage_id] for passage_id in ids]
        sizes = np.array([len(held) for held in sets])
        indices = np.concatenate([np.fromiter(held, np.int64, len(held)) for held in sets])
        bounds = np.concatenate([[0], sizes.cumsum()])
        held_by = csr_matrix((np.ones(indices.size), indices, bounds), shape=(n, len(words)))
        shared = (held_by @ held_by.T).toarray()
        union = sizes[:, None] + sizes[None, :] - shared
        jaccard = np.tril(shared / np.maximum(union, 1), k=-1)
        covered: set[int] = set()
        new = []
        for held in sets:
            here = (asked & held) - covered
            new.append(len(here))
            covered |= here
        share = max(len(asked), 1)
        table[row, :n] = np.column_stack(
            [
                np.full(n, np.log1p(len(asked))),
                np.log1p(sizes),
                [len(asked & held) / share for held in sets],
                [len(asked & title[passage_id]) / share for passage_id in ids],
                np.array(new) / share,
                jaccard[:, 0],
                jaccard.max(axis=1),
            ]
        )
    return table
