"""Judged samples of a store become a policy, a verdict and a profile."""

from dataclasses import replace

import numpy as np
import pytest
from judged_samples import SERIES, WHOLE, GradedBy, serve, spoilt, truth_of, watched, watching
from simulated_pools import DEPTH, calibrated, guard_of, simulate
from watching import Watching

from calibration.from_store import calibrate_from_store, judged_store
from calibration.judged_requests import JudgedRequests, decided, decided_by_others, table_by_k
from calibration.settings import Settings, Wanted
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import Route
from ctxguard.errors import CalibrationError
from ctxguard.measure.rows import to_blocks
from ctxguard.measure.worth import READERS, STRICT, Utilities
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.store import LabelRow
from ctxguard.profile.schema import Profile
from tests.stored import all_judged

FIRST_TEN = JudgingRates(0.0, 0.0, 0.0, 1.0, 10)
"""What `ctxguard judge` has judged, of pools half as deep."""


CHEAP = Utilities(irrelevant=-0.2)
"""Costs at which a policy loses little recall."""


def read(live: Watching, series: str = SERIES, utilities: Utilities = READERS) -> JudgedRequests:
    return judged_store(live.store, series, utilities)


class Erring(GradedBy):
    """A judge that says yes to every third passage besides the relevant ones."""

    name = "erring"

    def __init__(self, relevant: dict[str, set[str]]) -> None:
        super().__init__(lambda query, name: int(name in relevant[query] or hash(name) % 3 == 0))


def erring(n: int) -> tuple[Watching, dict[str, set[str]]]:
    """Requests of a judge that errs, the first ten candidates of each judged."""
    retriever, dataset = simulate(n)
    relevant = {q.text: set(dataset.relevant(q.query_id)) for q in dataset.queries}
    live = watching(retriever, dataset, judge=Erring(relevant), rates=FIRST_TEN)
    return live, relevant


def grade(live: Watching, relevant: dict[str, set[str]], n: int) -> int:
    """Have people grade about n passages, as the draw asks; return how many they graded."""
    labels = [
        LabelRow(
            row.request_id,
            row.passage_id,
            3 * (row.passage_id in relevant[row.query]),
            None,
            "a",
            1.0,
        )
        for sample in to_label(live.store, "erring 1", n)
        for row in sample.rows()
    ]
    live.store.add_labels(labels, 3)
    return len(labels)


def test_judges_labels_grade_everything() -> None:
    found = read(watched(60))
    assert (found.pools.route, found.serving_k, found.questions.notes) == (Route.HYBRID, 3, ())
    assert found.is_graded.all()
    passages = found.rows.passages
    assert len(passages) == found.n_judged == 60 * DEPTH
    assert set(passages["asked_probability"]) == set(passages["size"]) == {1.0}
    _, truth = simulate(60)
    relevant = sum(len(truth.relevant(q.query_id)) for q in truth.queries)
    assert 0 < (passages["people_grade"] > 0).sum() <= relevant


def test_retrieved_can_be_decided_again() -> None:
    retriever, _ = simulate(5)
    found = read(watched(5))
    for query, ids in zip(found.questions.queries, found.pools.passage_ids, strict=True):
        assert set(ids) == set(retriever.rankings[query.text].passage_ids)
    assert set(found.pools.legs) == {"dense", "lexical"}


def test_requests_weigh_by_probability() -> None:
    """A request weighs 1 by its probability and repeats share a fold and a cluster."""
    retriever, dataset = simulate(3)
    texts = [query.text for query in dataset.queries]
    live = Watching(truth_of(dataset), rates=WHOLE)
    contexts = serve(retriever, [*texts, texts[0]])
    live.watch(*contexts[:1], probability=0.1)
    live.watch(*contexts[1:], probability=0.5)
    judged = read(live)
    assert judged.rows.requests["probability"].tolist() == pytest.approx([0.1, 0.5, 0.5, 0.5])
    assert judged.fold[0] == judged.fold[3]
    session = judged.rows.requests["session"].tolist()
    assert len(set(session)) == 3
    assert session[0] == session[3]


def test_commonest_route_is_taken() -> None:
    retriever, dataset = simulate(8)
    contexts = serve(retriever, [query.text for query in dataset.queries])
    for place in (0, 5):
        decision = contexts[place].decision
        ranking = replace(decision.ranking, route=Route.LEXICAL)
        contexts[place] = replace(
            contexts[place], decision=replace(decision, ranking=ranking), route=Route.LEXICAL
        )
    live = Watching(truth_of(dataset), rates=WHOLE)
    live.watch(*contexts)
    found = read(live)
    assert (found.pools.route, len(found.questions)) == (Route.HYBRID, 6)
    assert found.questions.notes == ("2 judged samples left out: of another route (lexical)",)
    with pytest.raises(CalibrationError, match="no sample judged by 'labels 2'"):
        read(live, series="labels 2")


def test_cut_says_nothing_of_today() -> None:
    retriever, dataset = simulate(20)
    guard = guard_of(retriever, calibrated(60).profile, mode="enforce", depth=DEPTH)
    live = Watching(truth_of(dataset), rates=WHOLE)
    live.watch(*[guard.retrieve(query.text) for query in dataset.queries])
    assert read(live).serving_k is None


def test_coin_judged_stand_for_others() -> None:
    live = watched(40, rates=JudgingRates(0.25, 0.0, 0.0, 0.0))
    passages = read(live).rows.passages
    size = passages["size"][passages["rank"] == 0]
    assert set(size.tolist()) == {4.0}
    assert size.sum() == pytest.approx(40 * (DEPTH - 3), rel=0.2)


def test_grades_have_asking_probability() -> None:
    live, relevant = erring(80)
    bare = read(live, "erring 1")
    assert not bare.is_graded.any()
    assert not bare.is_corrected
    never = bare.rows.passages["size"] == 0.0
    assert ((bare.rows.passages["position"] >= 10) == never).all()
    n = grade(live, relevant, 300)
    judged = read(live, "erring 1")
    assert judged.is_corrected
    rows, own = judged.rows, judged.is_graded
    assert 60 <= own.sum() <= n
    chance, request = rows.passages["asked_probability"][own], rows.request[own]
    assert ((chance > 0.0) & (chance <= 1.0)).all()
    # By their inverse the grades stand for all judged candidates.
    n_judged = np.count_nonzero(~never)
    assert (judged.stands_for[request] / chance).sum() == pytest.approx(n_judged, rel=0.35)
    names = [*map(int, judged.pools.query_ids)]
    records = live.store.records(names)
    truth = [
        judged.pools.passage_ids[row][column] in relevant[records[names[row]].query]
        for row, column in zip(request, rows.passages["position"][own], strict=True)
    ]
    assert (rows.passages["people_grade"][own] > 0).tolist() == truth


def test_reading_a_store_changes_nothing() -> None:
    """The monitor's figures keep the utilities that it was given."""
    live, relevant = erring(40)
    grade(live, relevant, 200)
    before = to_blocks(all_judged(live.store, "erring 1"))
    strict = read(live, "erring 1", STRICT)
    assert strict.is_graded.any()
    assert to_blocks(all_judged(live.store, "erring 1")) == before
    assert set(strict.rows.passages["worth"]) == {1.0, -0.5, -0.2}


def test_too_few_grades_give_nothing() -> None:
    live, relevant = erring(40)
    grade(live, relevant, 20)
    with pytest.raises(CalibrationError, match="at least about"):
        calibrate_from_store(read(live, "erring 1"), Settings())


def test_other_routes_stay() -> None:
    in_force = spoilt(calibrated(60).profile)
    found = read(watched(160), utilities=CHEAP)
    profile = calibrate_from_store(
        found,
        Settings(serving_k=3, tolerance=0.03, context="utility"),
        in_force,
        fusion=in_force.fusion,
        fingerprint=in_force.fingerprint,
    )
    assert profile.routes[Route.LEXICAL] == in_force.routes[Route.LEXICAL]
    assert (profile.fusion, profile.fingerprint) == (in_force.fusion, in_force.fingerprint)
    route = profile.routes[Route.HYBRID]
    assert route.safe_policy == RatioPolicy(k=3)
    assert route.certificate is None
    assert profile.provenance.depth == DEPTH
    assert Profile.model_validate_json(profile.to_json()) == profile
    spoilt_one, today = in_force.routes[Route.HYBRID].policy, route.safe_policy
    before = found.gain(decided(found.pools, spoilt_one), decided(found.pools, today))["recall"]
    assert before.value < -0.3 < route.verdict.recall.value, "it served too little"
    assert isinstance(route.policy, ExpectedUtilityPolicy)
    assert route.verdict.decision == "enforce"
    assert "on 160 labelled queries" in route.verdict.statement
    assert found.in_words == "160 requests judged by known labels"


def test_gainless_policy_keeps_today() -> None:
    """What is shown to be safe and to gain nothing stays as it is today, as with labels."""
    made = calibrate_from_store(read(watched(160)), Settings(serving_k=3))
    verdict = made.verdict
    assert verdict.short == "keep: safe, but no gain is shown"
    assert verdict.recall.lower > -verdict.max_loss
    route = made.routes[Route.HYBRID]
    assert route.policy == RatioPolicy(k=3)
    assert route.evidence.metrics["kept"].value == 3.0


def test_shadow_says_requests_needed() -> None:
    found = read(watched(40), utilities=CHEAP)
    made = calibrate_from_store(found, Settings(serving_k=3, tolerance=0.05))
    verdict = made.verdict
    assert verdict.decision == "shadow"
    assert 40 < verdict.n_needed < 2_000
    assert f"about {verdict.n_needed} such queries would probably decide" in verdict.statement


@pytest.mark.parametrize(
    ("context", "most"), [("leaner", 1.0), ("balanced", 1.03), ("richer", 2.06), ("utility", 9.0)]
)
def test_contexts_bound_the_tokens(context: Wanted, most: float) -> None:
    """Of traffic as of labels: today's tokens, twice as many, or whatever is worth it."""
    found = read(watched(160))
    rng = np.random.default_rng(0)
    tokens = np.where(np.isnan(found.pools.scores), np.nan, rng.integers(50, 400, (160, 1)))
    tokens = tokens * rng.uniform(0.3, 1.7, tokens.shape)
    found = replace(found, pools=replace(found.pools, tokens=tokens))
    settings = Settings(serving_k=3, context=context)
    verdict = calibrate_from_store(found, settings).verdict
    contexts = decided_by_others(found, settings), decided(found.pools, RatioPolicy(k=3))
    size, today = (found.sizes(each)["tokens"].value for each in contexts)
    assert size <= most * today
    if context == "leaner":
        assert verdict.recall.value > -0.02, "as many relevant passages by P as today"
    if context in ("richer", "utility"):
        assert size > 1.1 * today
    assert verdict.tokens.value == pytest.approx(size / today - 1.0, abs=1e-5)


def test_unlabelled_passages_count_as_live() -> None:
    """Where labels name some passages alone, the others are not relevant, nor guessed at."""
    retriever, dataset = simulate(60)
    some = {}
    for query in dataset.queries:
        first, *_ = sorted(dataset.relevant(query.query_id))
        some[query.text] = {first: 1, "another": 0}
    found = read(watching(retriever, dataset, judge=LabelJudge(some)))
    assert found.is_graded.all()
    contexts = zip(some.values(), serve(retriever, [*some]), strict=True)
    truth = np.mean([len(labels.keys() & {*one.served_ids}) / 3 for labels, one in contexts])
    precision = table_by_k(found)[3]["precision"]
    assert precision.value == pytest.approx(truth)


def test_texts_unknown_count_passages() -> None:
    found = read(watched(160))
    found = replace(found, pools=replace(found.pools, tokens=None))
    sizes = found.sizes(decided_by_others(found, Settings(serving_k=3)))
    assert sizes["tokens"].value is None
    made = calibrate_from_store(found, Settings(serving_k=3))
    assert made.verdict.tokens.value == pytest.approx(sizes["kept"].value / 3 - 1.0, abs=1e-5)


def test_synthetic_questions_are_never_enforced() -> None:
    retriever, dataset = simulate(160)
    contexts = serve(retriever, [query.text for query in dataset.queries])
    live = Watching(truth_of(dataset), rates=WHOLE)
    live.watch(*[replace(each, request_id=f"written-{n}") for n, each in enumerate(contexts)])
    found = read(live, utilities=CHEAP)
    made = calibrate_from_store(found, Settings(serving_k=3, context="utility"))
    assert made.verdict.decision == "shadow"
    assert any("synthetic" in note for note in made.provenance.notes)
    assert made.unverified
