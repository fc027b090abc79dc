"""The profile on disk: what is written, what is read back, and what is refused by name."""

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import ctxguard
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ProfileError, ProfileFormatError
from ctxguard.measure.worth import Utilities
from ctxguard.profile.comparison import fingerprint_differences
from ctxguard.profile.schema import (
    Certificate,
    Interval,
    Profile,
    Provenance,
    RouteEvidence,
    RouteProfile,
)

MODEL = RelevanceModel(
    legs=("dense",),
    coefficients=(1.5, -0.25, 0.0, 1e-9, 3.0),
    means=(0.1, 0.2, 0.3, 0.4, 0.5),
    scales=(1.0, 2.0, 3.0, 4.0, 5.0),
    intercept=-2.5,
)
SIGNALS_MODEL = RelevanceModel(
    legs=("dense",),
    coefficients=(1.5, -0.25, 0.0, 1e-9, 3.0, 0.5),
    means=(0.0,) * 6,
    scales=(1.0,) * 6,
    intercept=-2.5,
    features=("ranker.z",),
    clip=8.0,
)
CERTIFICATE = Certificate(
    alpha=0.1,
    delta=0.1,
    baseline_k=10,
    test="betting p-values, fixed sequence",
    recall_loss=0.031,
    n_recall=120,
)
DIFFERENCE = CERTIFICATE.model_copy(
    update={
        "baseline_k": 5,
        "test": "betting bound",
        "recall_difference": Interval(-0.004, -0.0306, None, 140),
    }
)
PROFILE = Profile(
    routes={
        Route.HYBRID: RouteProfile(
            policy=ExpectedUtilityPolicy(model=MODEL, k=7, cost=0.2),
            score_kind=ScoreKind.RATIO,
            why="two scorers",
            certificate=CERTIFICATE,
            evidence=RouteEvidence(
                queries=150,
                metrics={
                    "recall": Interval(value=0.9, lower=0.85, upper=0.95, n=120),
                    "mrr": Interval(value=None, lower=None, upper=None, n=0),
                },
                shown_by="held_out",
                most_recall_loss=0.08,
            ),
            safe_policy=RatioPolicy(k=10),
        ),
        Route.LEXICAL: RouteProfile(
            policy=RatioPolicy(k=4, min_ratio=0.7), score_kind=ScoreKind.RATIO
        ),
    },
    fusion=Fusion("convex", 0.35),
    utilities=Utilities(by_grade={2: 1.0, 0: -0.25}),
    fingerprint={"embedder": "mini", "corpus_size": "3"},
    provenance=Provenance(
        ctxguard_version="0.1.0",
        seed=7,
        dataset="Küchenfragen",
        dataset_digest="0" * 64,
        depth=100,
        versions={"numpy": "2.0"},
        notes=("one query was skipped",),
    ),
)


def with_route(**settings: object) -> Profile:
    """The profile with its hybrid route alone, and these settings of it."""
    served = PROFILE.routes[Route.HYBRID].model_copy(update=settings)
    return PROFILE.model_copy(update={"routes": {Route.HYBRID: served}})


def with_model(model: RelevanceModel) -> Profile:
    """The profile with this model in the policy of its hybrid route."""
    return with_route(policy=ExpectedUtilityPolicy(model=model, k=7))


ALL_SAFE = PROFILE.model_copy(
    update={
        "routes": {
            route: own.model_copy(update={"safe_policy": RatioPolicy(k=10)})
            for route, own in PROFILE.routes.items()
        }
    }
)
SKETCHED = PROFILE.model_copy(update={"corpus": CorpusSketch.of(range(5000))})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def changed(file: Path, where: str, **values: object) -> Path:
    """The saved profile with these values at a dotted path of its JSON."""
    data = json.loads(file.read_text(encoding="utf-8"))
    inside(data, where).update(values)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


Data = dict[str, Any]


def inside(data: Data, path: str) -> Data:
    """The part of a profile's JSON at a dotted path; the profile itself for an empty one."""
    for name in filter(None, path.split(".")):
        data = data[name]
    return data


class TestRoundTrip:
    def test_order_of_routes_does_not_show(self) -> None:
        backwards = dict(reversed(PROFILE.routes.items()))
        assert PROFILE.model_copy(update={"routes": backwards}).to_json() == PROFILE.to_json()

    def test_another_profile_has_another_id(self) -> None:
        assert PROFILE.model_copy(update={"fingerprint": {}}).profile_id != PROFILE.profile_id
        assert len(PROFILE.profile_id) == 12

    @pytest.mark.parametrize(
        "profile",
        [
            PROFILE,
            PROFILE.model_copy(update={"utilities": replace(PROFILE.utilities, unjudged=-0.1)}),
            with_route(certificate=DIFFERENCE),
            with_model(SIGNALS_MODEL),
            ALL_SAFE.safe(),
            SKETCHED,
        ],
        ids=["common", "unjudged", "recall difference", "signals", "safe", "corpus sketch"],
    )
    def test_every_part_survives(self, file: Path, profile: Profile) -> None:
        profile.save(file)
        loaded = Profile.load(file)
        assert (loaded, loaded.profile_id) == (profile, profile.profile_id)
        assert loaded.to_json().encode() == file.read_bytes()

    def test_a_profile_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            PROFILE.fingerprint = {}  # type: ignore[misc]


class TestSafe:
    def test_each_route_serves_its_safe_policy(self) -> None:
        """Each route of the same system is served by its safe policy."""
        sketched = ALL_SAFE.model_copy(update={"corpus": SKETCHED.corpus})
        safe = sketched.safe()
        assert (safe.corpus, safe.routes.keys()) == (sketched.corpus, sketched.routes.keys())
        for route, own in safe.routes.items():
            assert own.policy == own.safe_policy == RatioPolicy(k=10)
            assert own.score_kind is ALL_SAFE.routes[route].score_kind
        assert (safe.fingerprint, safe.fusion) == (ALL_SAFE.fingerprint, ALL_SAFE.fusion)

    def test_safe_profile_claims_nothing_former(self) -> None:
        """It claims nothing of the former policies and says whose it is."""
        safe = ALL_SAFE.safe()
        hybrid = safe.routes[Route.HYBRID]
        assert hybrid.certificate is hybrid.evidence is None
        note = f"safe policies of profile {ALL_SAFE.profile_id}, uncertified"
        assert safe.provenance.notes == (*ALL_SAFE.provenance.notes, note)
        assert ALL_SAFE.profile_id in hybrid.why
        assert ALL_SAFE.profile_id != safe.profile_id == ALL_SAFE.safe().profile_id

    def test_a_route_without_one_is_named(self) -> None:
        with pytest.raises(ProfileError, match=r"names no safe policy for lexical; calibrate"):
            PROFILE.safe()


class TestSaving:
    def test_folders_are_made(self, tmp_path: Path) -> None:
        PROFILE.save(tmp_path / "a" / "b" / "profile.json")
        assert Profile.load(tmp_path / "a" / "b" / "profile.json") == PROFILE

    def test_failed_save_leaves_the_old_profile(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = file.read_bytes()

        def full_disk(_descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(ProfileError, match=r"cannot be written \(No space .*\): make room"):
            PROFILE.model_copy(update={"fingerprint": {}}).save(file)
        assert (file.read_bytes(), list(file.parent.glob("*.json"))) == (before, [file])

    def test_unwritable_places_are_typed(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "folder.json").mkdir()
        for place in (tmp_path / "file" / "p.json", tmp_path / "folder.json"):
            with pytest.raises(ProfileError, match="cannot be written"):
                PROFILE.save(place)

    def test_number_json_lacks_is_never_written(self) -> None:
        with pytest.raises(ValidationError, match="finite"):
            CERTIFICATE.model_validate({**CERTIFICATE.model_dump(), "recall_loss": math.nan})


LEXICAL, HYBRID = "routes.lexical.policy", "routes.hybrid.policy"
OBJECTS = [
    *("", "provenance", "fusion", "utilities", "routes.lexical", LEXICAL, HYBRID),
    *(f"{HYBRID}.model", "routes.hybrid.certificate", "routes.hybrid.evidence"),
]
KINDS = {LEXICAL: f"{LEXICAL}.ratio", HYBRID: f"{HYBRID}.expected_utility"}
VALUES: list[tuple[str, Data, str]] = [
    (LEXICAL, {"min_ratio": 70}, r"routes\.lexical\.policy.*min_ratio 70"),
    (LEXICAL, {"kind": "neural"}, r"routes\.lexical\.policy.*neural"),
    ("routes", {"sparse": {}}, r"routes\.sparse"),
    *[
        (LEXICAL, {field: value}, rf"routes\.lexical\.policy\.ratio\.{field}")
        for field, value in [
            *(("k", True), ("k", "10"), ("k", 10.0), ("min_ratio", "0.7"), ("min_ratio", True))
        ]
    ],
    *[
        ("", {"schema_version": version}, f"is {version!r}, but this release reads 1")
        for version in (2, 0, "1", None, 1.5)
    ],
    ("", {"schema_version": True}, "schema_version is True"),
]
BREADTH: list[tuple[str, Data, str]] = [
    ("provenance", {"notes": [""] * 200_000}, "over 100,000 values"),
    ("", {f"k{n}": n for n in range(99_000)}, "99,000 fields do not match"),
    ("", {f"k{n}": n for n in range(101)}, "101 fields do not match"),
]
CONTENTS = {
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a text": b'"profile"',
    "binary": b"\xff\xfe\x00",
    "latin-1": b'{"schema_version": 1, "why": "\x80"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "deep": b"[" * 100_000,
    "a long number": b'{"schema_version": ' + b"9" * 5_000 + b"}",
}


def refused(file: Path | str, message: str) -> ProfileFormatError:
    with pytest.raises(ProfileFormatError, match=message) as caught:
        Profile.load(file)
    return caught.value


class TestRefusals:
    def test_reason_omits_the_librarys_prefix(self, file: Path) -> None:
        found = refused(changed(file, "utilities", unjudged=0.5), "utility unjudged 0.5 must be")
        assert "Value error" not in str(found)

    @pytest.mark.parametrize("where", OBJECTS)
    def test_unknown_field_is_refused_by_name(self, file: Path, where: str) -> None:
        named = next((where.replace(*kind) for kind in KINDS.items() if kind[0] in where), where)
        changed(file, where, min_ration=0.7)
        refused(file, f"profile.json: {f'{named}.min_ration'.lstrip('.')}: ")

    @pytest.mark.parametrize(("where", "values", "message"), VALUES)
    def test_unusable_value_is_named(
        self, file: Path, where: str, values: Data, message: str
    ) -> None:
        refused(changed(file, where, **values), message)

    @pytest.mark.parametrize(("where", "values", "message"), BREADTH)
    def test_excess_is_counted_not_described(
        self, file: Path, where: str, values: Data, message: str
    ) -> None:
        """More than a profile holds is counted and neither described nor kept."""
        error = refused(changed(file, where, **values), message)
        assert not isinstance(error.__cause__, ValidationError)
        assert not isinstance(error.__context__, ValidationError)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"features": ["ranker", "ranker.z"]}, "6 numbers for 7 features"),
            ({"features": ["ranker.median"]}, "is not a feature"),
            ({"legs": ["dense", "lexical"]}, "6 numbers for 13 features"),
            ({"clip": -1.0}, "clip -1.0"),
            ({"clip": "far"}, "valid number"),
            ({"scales": [0.0] * 6}, "must be > 0"),
            ({"coefficients": [0.0, "x", 0.0, 0.0, 0.0, 0.0]}, "valid number"),
        ],
    )
    def test_a_damaged_model_is_refused(self, file: Path, change: Data, message: str) -> None:
        with_model(SIGNALS_MODEL).save(file)
        refused(changed(file, f"{HYBRID}.model", **change), rf"routes\.hybrid.*{message}")

    def test_a_missing_field_is_named(self, file: Path) -> None:
        file.write_text('{"schema_version": 1, "routes": {}}')
        refused(file, "provenance: Field required")

    @pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
    def test_file_without_a_profile_is_named(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        refused(file, r"profile\.json")

    def test_every_truncation_is_refused(self, file: Path) -> None:
        whole = file.read_bytes()
        for length in range(0, len(whole) - 2, 37):
            file.write_bytes(whole[:length])
            refused(file, "not JSON")

    @pytest.mark.parametrize(
        "digits",
        [f"{2**63}", f"{-(2**63) - 1}", f"{10**30}", "1" + "0" * 5000],
        ids=["first", "first below 0", "long", "longest"],
    )
    @pytest.mark.parametrize(
        ("where", "name"),
        [
            (f"{HYBRID}", "k"),
            ("provenance", "depth"),
            ("provenance", "seed"),
            ("corpus", "passages"),
            ("utilities", "distractor"),
        ],
    )
    def test_integer_over_64_bits_is_refused(
        self, file: Path, digits: str, where: str, name: str
    ) -> None:
        SKETCHED.save(file)
        data = json.loads(file.read_text(encoding="utf-8"))
        inside(data, where)[name] = "NUMBER"
        file.write_text(json.dumps(data).replace('"NUMBER"', digits), encoding="utf-8")
        refused(file, r"profile\.json: not JSON \(.*(64 bits|digits)")

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
    @pytest.mark.parametrize(
        "where", ['"intercept": -2.5', '"weight": 0.35', '"recall_loss": 0.031']
    )
    def test_infinite_number_is_refused(self, file: Path, number: str, where: str) -> None:
        text = file.read_text(encoding="utf-8")
        assert where in text
        name = where.partition(":")[0]
        file.write_text(text.replace(where, f"{name}: {number}"), encoding="utf-8")
        refused(file, r"profile\.json")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (os.mkfifo, "not a regular file"),
            (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
            (lambda path: path.touch() or os.truncate(path, 1 << 40), "over 4 MiB"),
        ],
        ids=["pipe", "device", "huge"],
    )
    def test_endless_file_is_refused_at_once(
        self, tmp_path: Path, make: Callable[[Path], object], message: str
    ) -> None:
        make(tmp_path / "other.json")
        refused(tmp_path / "other.json", message)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("a\0b", "cannot be read as a profile"),
            ("x" * 5_000, "cannot be read as a profile"),
            ("absent.json", "ctxguard calibrate"),
            ("", "cannot be read"),
        ],
        ids=["null character", "long", "absent", "folder"],
    )
    def test_path_without_a_file_is_refused(self, tmp_path: Path, name: str, message: str) -> None:
        refused(f"{tmp_path}/{name}", message)

    def test_first_fault_ends_the_check(self, file: Path) -> None:
        error = refused(changed(file, "provenance", notes=[1] * 500), r"\.0: Input should be")
        assert isinstance(error.__cause__, ValidationError)
        assert error.__cause__.error_count() == 1

    def test_repeated_key_is_refused(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('"routes":', '"routes": {}, "routes":'), encoding="utf-8")
        refused(file, "occurs twice")


class TestSchema:
    def test_the_committed_schema_is_the_codes(self) -> None:
        committed = Path(ctxguard.__file__).parent / "profile" / "profile.schema.json"
        assert json.loads(committed.read_text(encoding="utf-8")) == Profile.model_json_schema(), (
            "run `make schema`, and raise SCHEMA_VERSION where old profiles no longer load"
        )

    def test_schema_refuses_unknown_fields_everywhere(self) -> None:
        schema = Profile.model_json_schema()
        assert schema["additionalProperties"] is False
        objects = {n: d for n, d in schema["$defs"].items() if d.get("type") == "object"}
        for name, definition in objects.items():
            assert definition.get("additionalProperties") is False, name
        assert "RatioPolicy" in objects


class TestCorpusSketch:
    def test_tells_how_much_has_changed(self, file: Path) -> None:
        SKETCHED.save(file)
        loaded = Profile.load(file)
        assert loaded.corpus is not None
        assert loaded.corpus.changed_share(CorpusSketch.of(range(10_000))) == pytest.approx(0.5)
        assert file.stat().st_size < len(PROFILE.to_json()) + 12_000

    @pytest.mark.parametrize("digests", ["", "AAAA", "%", 3])
    def test_one_that_is_damaged_is_refused(self, file: Path, digests: object) -> None:
        SKETCHED.save(file)
        refused(changed(file, "corpus", digests=digests), "corpus")


class TestCertificate:
    def test_it_reads_as_a_sentence(self) -> None:
        assert CERTIFICATE.statement == (
            "For this route by itself, with probability at least 0.9: over queries for which the "
            "retriever's first 10 hold a relevant passage, mean recall loss is at most 0.1 "
            "(betting p-values, fixed sequence; 120 such test queries, observed 0.031)."
        )

    def test_it_states_a_decrease_in_recall(self) -> None:
        assert DIFFERENCE.statement == (
            "For this route by itself, with probability at least 0.9: over queries that have a "
            "relevant passage, mean recall is at most 0.0306 below that of the retriever's first "
            "5 (betting bound; 140 such test queries, observed -0.004)."
        )

    @pytest.mark.parametrize(
        ("value", "lower", "says"),
        [
            (0.08, 0.0213, "mean recall is at least 0.0213 above that of"),
            (0.08, 0.0213, "observed +0.080"),
            (0.01, 0.0, "mean recall is at most 0 below"),
            (0.01, -0.0, "mean recall is at most 0 below"),
        ],
    )
    def test_states_an_increase_or_none(self, value: float, lower: float, says: str) -> None:
        found = Interval(value, lower, None, 140)
        assert says in DIFFERENCE.model_copy(update={"recall_difference": found}).statement

    @pytest.mark.parametrize(
        ("alpha", "lower", "nothing"),
        [(0.1, -0.1, False), (0.5, -0.5, False), (0.6, -0.1, True), (0.1, -0.6, True)],
    )
    def test_more_than_half_is_no_promise(
        self, alpha: float, lower: float, *, nothing: bool
    ) -> None:
        found = Interval(0.0, lower, None, 140)
        update = {"alpha": alpha, "recall_difference": found}
        assert DIFFERENCE.model_copy(update=update).promises_nothing == nothing
        assert not CERTIFICATE.promises_nothing
        assert CERTIFICATE.model_copy(update={"alpha": 0.51}).promises_nothing


class TestFingerprints:
    def test_changed_part_is_named_with_values(self) -> None:
        expected = {"analyser": "porter", "embedder": "mini", "same": "x"}
        actual = {"embedder": "large", "reranker": "ce", "same": "x"}
        assert fingerprint_differences(expected, actual) == (
            "analyser is absent here, was 'porter'",
            "embedder is 'large', was 'mini'",
            "reranker is 'ce', was absent",
        )

    @given(*[st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=4)] * 2)
    def test_differences_exactly_where_systems_differ(
        self, expected: dict[str, str], actual: dict[str, str]
    ) -> None:
        assert bool(fingerprint_differences(expected, actual)) == (expected != actual)
