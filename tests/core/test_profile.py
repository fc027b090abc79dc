"""The profile on disk: what is written, what is read back, and what is refused by name."""

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import ctxguard
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.metrics import Utilities
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.trees import Trees
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ProfileError, ProfileFormatError
from ctxguard.profile.schema import (
    Certificate,
    Evidence,
    Interval,
    Profile,
    Provenance,
    RecallDifference,
    RouteProfile,
    SegmentProfile,
    fingerprint_differences,
    json_schema,
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
    trees=Trees(-1.0, ((5, 0), ()), ((0.5, 0.25), ()), ((3, 1), ()), ((0.1, 0.2, 0.3), (0.4,))),
)
CERTIFICATE = Certificate(
    alpha=0.1,
    beta=None,
    delta=0.1,
    baseline="k=10",
    test="betting p-values, fixed sequence",
    p_value=0.04,
    recall_loss=0.031,
    harm=0.4,
    n_recall=120,
    n_queries=150,
)
DIFFERENCE = CERTIFICATE.model_copy(
    update={
        "baseline": "k=5",
        "test": "betting bound",
        "recall_difference": RecallDifference(value=-0.004, lower=-0.0306, n=140),
    }
)
PROFILE = Profile(
    routes={
        Route.HYBRID: RouteProfile(
            policy=ExpectedUtilityPolicy(model=MODEL, k=7, cost=0.2),
            score_kind=ScoreKind.RATIO,
            why="two scorers",
            certificate=CERTIFICATE,
            segments={"de": SegmentProfile(policy=RatioPolicy(k=3), certificate=CERTIFICATE)},
            chosen_on=Evidence(
                queries=150,
                metrics={"recall": Interval(value=0.9, lower=0.85, upper=0.95, n=120)},
            ),
            held_out=Evidence(
                queries=1, metrics={"recall": Interval(value=None, lower=None, upper=None, n=0)}
            ),
            reference={"kept": (1.0, 2.0, 3.0), "top_score": (0.1, 0.2, 0.3)},
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
    segment_by="language",
)


def with_model(model: RelevanceModel) -> Profile:
    """The profile with this model in the policy of its hybrid route."""
    hybrid = PROFILE.routes[Route.HYBRID]
    served = hybrid.model_copy(update={"policy": ExpectedUtilityPolicy(model=model, k=7)})
    return PROFILE.model_copy(update={"routes": {Route.HYBRID: served}})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The saved profile with its JSON changed."""
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    k = draw(st.integers(1, 50))
    min_keep = draw(st.integers(0, k))
    ratio = RatioPolicy(k, draw(st.floats(0.0, 1.0)), draw(st.floats(1e-3, 1e3)), min_keep)
    model = RelevanceModel(
        ("dense",),
        tuple(draw(st.lists(numbers, min_size=5, max_size=5))),
        tuple(draw(st.lists(numbers, min_size=5, max_size=5))),
        tuple(draw(st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5))),
        draw(numbers),
    )
    utility = ExpectedUtilityPolicy(
        model, k, draw(st.floats(0.0, 1e6)), draw(st.floats(1e-6, 1e6)), min_keep
    )
    routes = draw(st.lists(st.sampled_from(list(Route)), unique=True, max_size=3))
    grades = st.dictionaries(st.integers(0, 12), st.floats(-5.0, 5.0), max_size=4)
    return Profile(
        routes={
            route: RouteProfile(
                policy=draw(st.sampled_from([ratio, utility])),
                score_kind=draw(st.sampled_from(list(ScoreKind))),
                why=draw(st.text(max_size=20)),
                safe_policy=draw(st.sampled_from([None, ratio, utility])),
            )
            for route in routes
        },
        fusion=Fusion("convex", draw(st.floats(0.0, 1.0))),
        utilities=Utilities(by_grade=draw(st.none() | grades)),
        fingerprint=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
        provenance=PROFILE.provenance,
    )


class TestRoundTrip:
    def test_what_is_read_equals_what_was_saved(self, file: Path) -> None:
        assert Profile.load(file) == PROFILE

    def test_saving_what_was_read_gives_the_same_bytes(self, file: Path) -> None:
        again = file.with_name("again.json")
        Profile.load(file).save(again)
        assert again.read_bytes() == file.read_bytes()

    @given(profiles())
    @settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_every_profile_survives_byte_for_byte(self, tmp_path: Path, profile: Profile) -> None:
        path = tmp_path / "profile.json"
        profile.save(path)
        loaded = Profile.load(path)
        assert loaded == profile
        assert loaded.to_json().encode() == path.read_bytes()
        assert loaded.profile_id == profile.profile_id

    def test_the_order_in_which_routes_were_added_does_not_show(self) -> None:
        backwards = dict(reversed(PROFILE.routes.items()))
        assert PROFILE.model_copy(update={"routes": backwards}).to_json() == PROFILE.to_json()

    def test_another_profile_has_another_id(self) -> None:
        assert PROFILE.model_copy(update={"segment_by": None}).profile_id != PROFILE.profile_id
        assert len(PROFILE.profile_id) == 12

    def test_the_worth_of_unjudged_passages_survives(self, file: Path) -> None:
        own = replace(PROFILE.utilities, unjudged=-0.1)
        PROFILE.model_copy(update={"utilities": own}).save(file)
        assert Profile.load(file).utilities.unjudged == -0.1

    def test_a_certificate_of_a_recall_difference_survives(self, file: Path) -> None:
        route = PROFILE.routes[Route.HYBRID]
        certified = route.model_copy(update={"certificate": DIFFERENCE})
        PROFILE.model_copy(update={"routes": {Route.HYBRID: certified}}).save(file)
        assert Profile.load(file).routes[Route.HYBRID].certificate == DIFFERENCE

    def test_a_model_with_named_signals_and_trees_survives(self, tmp_path: Path) -> None:
        profile = with_model(SIGNALS_MODEL)
        profile.save(tmp_path / "profile.json")
        found = Profile.load(tmp_path / "profile.json")
        assert found == profile
        policy = found.routes[Route.HYBRID].policy
        assert isinstance(policy, ExpectedUtilityPolicy)
        assert policy.model == SIGNALS_MODEL
        assert policy.model.signals == ("ranker",)

    def test_a_profile_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            PROFILE.segment_by = "country"  # type: ignore[misc]


ALL_SAFE = PROFILE.model_copy(
    update={
        "routes": {
            route: own.model_copy(update={"safe_policy": RatioPolicy(k=10)})
            for route, own in PROFILE.routes.items()
        }
    }
)


class TestSafe:
    def test_each_route_is_served_by_its_safe_policy(self) -> None:
        safe = ALL_SAFE.safe()
        assert safe.routes.keys() == ALL_SAFE.routes.keys()
        for own in safe.routes.values():
            assert own.policy == own.safe_policy == RatioPolicy(k=10)
            assert own.segments == {}

    def test_it_is_for_the_same_system(self) -> None:
        safe = ALL_SAFE.safe()
        assert safe.fingerprint == ALL_SAFE.fingerprint
        assert safe.fusion == ALL_SAFE.fusion
        assert safe.routes[Route.HYBRID].score_kind is ScoreKind.RATIO

    def test_it_claims_nothing_that_was_shown_of_the_former_policies(self) -> None:
        hybrid = ALL_SAFE.safe().routes[Route.HYBRID]
        assert hybrid.certificate is hybrid.chosen_on is hybrid.held_out is None
        # What the retriever gives is the same; how much of it is kept is not.
        assert hybrid.reference == {"top_score": (0.1, 0.2, 0.3)}

    def test_it_says_whose_safe_policy_it_is(self) -> None:
        safe = ALL_SAFE.safe()
        note = f"safe policies of profile {ALL_SAFE.profile_id}, uncertified"
        assert safe.provenance.notes == (*ALL_SAFE.provenance.notes, note)
        assert ALL_SAFE.profile_id in safe.routes[Route.HYBRID].why
        assert safe.profile_id != ALL_SAFE.profile_id
        assert safe.profile_id == ALL_SAFE.safe().profile_id

    def test_a_route_without_one_is_named(self) -> None:
        with pytest.raises(ProfileError, match=r"names no safe policy for lexical; calibrate"):
            PROFILE.safe()

    def test_it_survives_the_disk(self, tmp_path: Path) -> None:
        ALL_SAFE.safe().save(tmp_path / "safe.json")
        assert Profile.load(tmp_path / "safe.json") == ALL_SAFE.safe()


class TestSaving:
    def test_folders_are_made(self, tmp_path: Path) -> None:
        PROFILE.save(tmp_path / "a" / "b" / "profile.json")
        assert Profile.load(tmp_path / "a" / "b" / "profile.json") == PROFILE

    def test_a_failed_save_leaves_the_old_profile_and_nothing_else(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = file.read_bytes()

        def full_disk(_descriptor: int) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            PROFILE.model_copy(update={"segment_by": None}).save(file)
        assert file.read_bytes() == before
        assert list(file.parent.iterdir()) == [file]

    def test_a_reader_never_meets_half_a_profile(self, file: Path) -> None:
        other = PROFILE.model_copy(update={"segment_by": None})
        done = threading.Event()

        def rewrite() -> None:
            for turn in range(100):
                (PROFILE if turn % 2 else other).save(file)
            done.set()

        writer = threading.Thread(target=rewrite)
        writer.start()
        read = 0
        while not done.is_set() or read == 0:
            assert Profile.load(file) in (PROFILE, other)
            read += 1
        writer.join()

    def test_a_number_that_json_cannot_carry_is_never_written(self) -> None:
        with pytest.raises(ValidationError, match="finite"):
            CERTIFICATE.model_validate({**CERTIFICATE.model_dump(), "harm": math.nan})


class TestRefusals:
    @pytest.mark.parametrize(
        ("where", "change"),
        [
            ("", lambda data: data),
            ("provenance", lambda data: data["provenance"]),
            ("fusion", lambda data: data["fusion"]),
            ("utilities", lambda data: data["utilities"]),
            ("routes.lexical", lambda data: data["routes"]["lexical"]),
            ("routes.lexical.policy.ratio", lambda data: data["routes"]["lexical"]["policy"]),
            (
                "routes.hybrid.policy.expected_utility",
                lambda data: data["routes"]["hybrid"]["policy"],
            ),
            (
                "routes.hybrid.policy.expected_utility.model",
                lambda data: data["routes"]["hybrid"]["policy"]["model"],
            ),
            ("routes.hybrid.certificate", lambda data: data["routes"]["hybrid"]["certificate"]),
            ("routes.hybrid.chosen_on", lambda data: data["routes"]["hybrid"]["chosen_on"]),
        ],
    )
    def test_an_unknown_field_is_refused_by_its_name(
        self, file: Path, where: str, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        changed(file, lambda data: change(data).update(min_ration=0.7))
        name = f"{where}.min_ration".lstrip(".")
        with pytest.raises(ProfileFormatError, match=f"profile.json: {name}: "):
            Profile.load(file)

    def test_a_value_out_of_range_names_its_field_and_the_value(self, file: Path) -> None:
        changed(file, lambda data: data["routes"]["lexical"]["policy"].update(min_ratio=70))
        with pytest.raises(ProfileFormatError, match=r"routes\.lexical\.policy.*min_ratio 70"):
            Profile.load(file)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"features": ["ranker", "ranker.z"]}, "6 numbers for 7 features"),
            ({"features": ["ranker.median"]}, "is no feature"),
            ({"legs": ["dense", "lexical"]}, "6 numbers for 13 features"),
            ({"clip": -1.0}, "clip -1.0"),
            ({"clip": "far"}, "valid number"),
            ({"trees": {}}, "Field required"),
            (("values", [[0.1, 0.2, 0.3]]), "the same trees"),
            (("values", [[0.1, 0.2, 0.3], []]), "tree 1 has 0 leaves"),
            (("features", [[6, 0], []]), "the trees compare feature 6, and there are only 6"),
            (("features", [[-5, 0], []]), "tree 0 compares feature -5"),
            (("masks", [[7, 1], []]), "must rule out some"),
            (("thresholds", [[0.5], []]), "2, 1 and 2"),
            (("thresholds", [[0.5, "x"], []]), "valid number"),
        ],
    )
    def test_a_damaged_model_is_refused(
        self, tmp_path: Path, change: dict[str, object] | tuple[str, object], message: str
    ) -> None:
        path = tmp_path / "profile.json"
        with_model(SIGNALS_MODEL).save(path)

        def damage(data: dict[str, Any]) -> None:
            model = data["routes"]["hybrid"]["policy"]["model"]
            if isinstance(change, tuple):
                model["trees"][change[0]] = change[1]
            else:
                model.update(change)

        with pytest.raises(ProfileFormatError, match=rf"routes\.hybrid.*{message}"):
            Profile.load(changed(path, damage))

    def test_an_unknown_route_or_kind_of_policy(self, file: Path) -> None:
        before = file.read_text(encoding="utf-8")
        changed(file, lambda data: data["routes"].update(sparse=data["routes"]["lexical"]))
        with pytest.raises(ProfileFormatError, match=r"routes\.sparse"):
            Profile.load(file)
        file.write_text(before, encoding="utf-8")
        changed(file, lambda data: data["routes"]["lexical"]["policy"].update(kind="neural"))
        with pytest.raises(ProfileFormatError, match=r"routes\.lexical\.policy.*neural"):
            Profile.load(file)

    def test_a_missing_field_is_named(self, file: Path) -> None:
        changed(file, lambda data: data.pop("provenance"))
        with pytest.raises(ProfileFormatError, match="provenance: Field required"):
            Profile.load(file)

    @pytest.mark.parametrize("version", [2, 0, "1", None, 1.5])
    def test_another_schema_says_which_this_release_reads(
        self, file: Path, version: object
    ) -> None:
        changed(file, lambda data: data.update(schema_version=version))
        with pytest.raises(ProfileFormatError, match=f"is {version!r}, this release reads 1"):
            Profile.load(file)

    @pytest.mark.parametrize("text", ["", "[]", "3", "null", '"profile"'])
    def test_json_that_is_no_profile(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ProfileFormatError, match=r"profile\.json"):
            Profile.load(file)

    def test_every_truncation_is_refused(self, file: Path) -> None:
        whole = file.read_bytes()
        for length in range(0, len(whole) - 2, 37):
            file.write_bytes(whole[:length])
            with pytest.raises(ProfileFormatError, match="not JSON"):
                Profile.load(file)

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
    @pytest.mark.parametrize("where", ['"intercept": -2.5', '"weight": 0.35', '"harm": 0.4'])
    def test_a_number_that_is_not_finite_is_refused(
        self, file: Path, number: str, where: str
    ) -> None:
        name = where.split(":", maxsplit=1)[0]
        text = file.read_text(encoding="utf-8")
        assert where in text
        file.write_text(text.replace(where, f"{name}: {number}"), encoding="utf-8")
        with pytest.raises(ProfileFormatError, match=r"profile\.json"):
            Profile.load(file)

    @pytest.mark.parametrize(
        "content",
        [b"\xff\xfe\x00", b'{"schema_version": 1, "why": "\x80"}', b"\xef\xbb\xbf{}"],
        ids=["binary", "latin-1", "byte order mark"],
    )
    def test_what_is_not_utf_8(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        with pytest.raises(ProfileFormatError, match=r"profile\.json"):
            Profile.load(file)

    @pytest.mark.parametrize(
        "text", ["[" * 100_000, '{"schema_version": ' + "9" * 5_000 + "}"], ids=["deep", "long"]
    )
    def test_json_made_to_exhaust_the_reader(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ProfileFormatError, match=r"profile\.json"):
            Profile.load(file)

    def test_a_huge_file_is_not_even_read(self, file: Path) -> None:
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
        with pytest.raises(ProfileFormatError, match="over 4 MiB"):
            Profile.load(file)

    @pytest.mark.parametrize("kind", ["pipe", "device", "device behind a link"])
    def test_what_is_no_regular_file_is_refused_at_once(self, tmp_path: Path, kind: str) -> None:
        file = tmp_path / "other.json"
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file = Path("/dev/zero")
        else:
            file.symlink_to("/dev/zero")
        with pytest.raises(ProfileFormatError, match="not a regular file"):
            Profile.load(file)

    @pytest.mark.parametrize("path", ["a\0b", "x" * 5_000])
    def test_what_cannot_be_a_path_is_refused(self, path: str) -> None:
        with pytest.raises(ProfileFormatError, match="cannot be read as a profile"):
            Profile.load(path)

    def test_a_file_of_values_without_end_is_refused_before_they_are_checked(
        self, file: Path
    ) -> None:
        changed(file, lambda data: data["routes"]["hybrid"].update(reference={"a": [""] * 200_000}))
        with pytest.raises(ProfileFormatError, match="over 100,000 values"):
            Profile.load(file)

    def test_a_file_of_too_many_keys_is_refused_before_they_are_checked(self, file: Path) -> None:
        changed(file, lambda data: data.update({f"k{n}": n for n in range(20_000)}))
        with pytest.raises(ProfileFormatError, match="over 20,000 keys") as refused:
            Profile.load(file)
        assert not isinstance(refused.value.__cause__, ValidationError)

    def test_many_faults_are_counted_and_neither_described_nor_kept(self, file: Path) -> None:
        changed(file, lambda data: data.update({f"k{n}": n for n in range(101)}))
        with pytest.raises(ProfileFormatError, match="101 fields do not match") as refused:
            Profile.load(file)
        assert refused.value.__cause__ is refused.value.__context__ is None

    @pytest.mark.parametrize("name", ["reference", "notes"])
    def test_the_first_fault_of_a_list_ends_its_check(self, file: Path, name: str) -> None:
        wrong: dict[str, Any] = {"reference": {"kept": ["x"] * 500}, "notes": [1] * 500}

        def spoil(data: dict[str, Any]) -> None:
            inside = data["provenance"] if name == "notes" else data["routes"]["hybrid"]
            inside[name] = wrong[name]

        changed(file, spoil)
        with pytest.raises(ProfileFormatError, match=r"\.0: Input should be") as refused:
            Profile.load(file)
        assert isinstance(refused.value.__cause__, ValidationError)
        assert refused.value.__cause__.error_count() == 1

    @pytest.mark.parametrize(
        ("field", "value"),
        [("k", True), ("k", "10"), ("k", 10.0), ("min_ratio", "0.7"), ("min_ratio", True)],
    )
    def test_a_value_of_another_type_is_not_turned_into_a_number(
        self, file: Path, field: str, value: object
    ) -> None:
        changed(file, lambda data: data["routes"]["lexical"]["policy"].update({field: value}))
        with pytest.raises(ProfileFormatError, match=rf"routes\.lexical\.policy\.ratio\.{field}"):
            Profile.load(file)

    def test_true_is_no_schema_version(self, file: Path) -> None:
        changed(file, lambda data: data.update(schema_version=True))
        with pytest.raises(ProfileFormatError, match="schema_version is True"):
            Profile.load(file)

    def test_a_key_that_stands_twice_is_refused(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('"routes":', '"routes": {}, "routes":'), encoding="utf-8")
        with pytest.raises(ProfileFormatError, match="one key twice"):
            Profile.load(file)

    def test_an_absent_file_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileFormatError, match="ctxguard calibrate"):
            Profile.load(tmp_path / "absent.json")

    def test_a_folder_is_no_profile(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileFormatError, match="cannot be read"):
            Profile.load(tmp_path)


class TestSchema:
    def test_the_committed_schema_is_the_codes(self) -> None:
        committed = Path(ctxguard.__file__).parent / "profile" / "profile.schema.json"
        assert json.loads(committed.read_text(encoding="utf-8")) == json_schema(), (
            "run `make schema`, and raise SCHEMA_VERSION where old profiles no longer load"
        )

    def test_every_object_of_the_schema_refuses_unknown_fields(self) -> None:
        schema = json_schema()
        assert schema["additionalProperties"] is False
        objects = {n: d for n, d in schema["$defs"].items() if d.get("type") == "object"}
        for name, definition in objects.items():
            assert definition.get("additionalProperties") is False, name
        assert "RatioPolicy" in objects


class TestCorpusSketch:
    SKETCHED = PROFILE.model_copy(update={"corpus": CorpusSketch.of(range(5000))})

    def test_a_sketch_survives(self, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        self.SKETCHED.save(path)
        loaded = Profile.load(path)
        assert loaded == self.SKETCHED
        assert loaded.corpus is not None
        assert loaded.corpus.changed_share(CorpusSketch.of(range(10_000))) == pytest.approx(0.5)
        assert path.stat().st_size < len(PROFILE.to_json()) + 12_000

    def test_its_safe_policy_is_of_the_same_corpus(self) -> None:
        sketched = ALL_SAFE.model_copy(update={"corpus": self.SKETCHED.corpus})
        assert sketched.safe().corpus == self.SKETCHED.corpus

    @pytest.mark.parametrize("digests", ["", "AAAA", "%", 3])
    def test_one_that_is_damaged_is_refused(self, tmp_path: Path, digests: object) -> None:
        path = tmp_path / "profile.json"
        self.SKETCHED.save(path)
        changed(path, lambda data: data["corpus"].update(digests=digests))
        with pytest.raises(ProfileFormatError, match="corpus"):
            Profile.load(path)


class TestCertificate:
    def test_it_reads_as_a_sentence(self) -> None:
        assert CERTIFICATE.statement == (
            "For this route by itself, with probability at least 0.9: over queries for which the "
            "retriever's first 10 hold a relevant passage, mean recall loss is at most 0.1 "
            "(betting p-values, fixed sequence; 120 such test queries, observed 0.031)."
        )

    def test_it_states_the_harm_where_one_was_promised(self) -> None:
        both = CERTIFICATE.model_copy(update={"beta": 0.5, "baseline": "pool"})
        assert (
            "the whole pool holds a relevant passage, mean recall loss is at most 0.1, and over "
            "all queries mean harm at most 0.5" in both.statement
        )

    def test_it_states_a_decrease_in_recall(self) -> None:
        assert DIFFERENCE.statement == (
            "For this route by itself, with probability at least 0.9: over queries that have a "
            "relevant passage, mean recall is at most 0.0306 below that of the retriever's first "
            "5 (betting bound; 140 such test queries, observed -0.004)."
        )

    def test_it_states_an_increase_in_recall(self) -> None:
        gained = RecallDifference(value=0.08, lower=0.0213, n=140)
        certificate = DIFFERENCE.model_copy(update={"recall_difference": gained})
        assert "mean recall is at least 0.0213 above that of" in certificate.statement
        assert "observed +0.080" in certificate.statement

    @pytest.mark.parametrize("lower", [0.0, -0.0])
    def test_no_decrease_is_none_below(self, lower: float) -> None:
        none = RecallDifference(value=0.01, lower=lower, n=140)
        certificate = DIFFERENCE.model_copy(update={"recall_difference": none})
        assert "mean recall is at most 0 below" in certificate.statement

    @pytest.mark.parametrize(
        ("alpha", "lower", "nothing"),
        [(0.1, -0.1, False), (0.5, -0.5, False), (0.6, -0.1, True), (0.1, -0.6, True)],
    )
    def test_more_than_half_of_the_recall_is_no_promise(
        self, alpha: float, lower: float, *, nothing: bool
    ) -> None:
        found = RecallDifference(value=0.0, lower=lower, n=140)
        update = {"alpha": alpha, "recall_difference": found}
        assert DIFFERENCE.model_copy(update=update).promises_nothing == nothing
        assert not CERTIFICATE.promises_nothing
        assert CERTIFICATE.model_copy(update={"alpha": 0.51}).promises_nothing


class TestFingerprints:
    def test_equal_systems_do_not_differ(self) -> None:
        assert fingerprint_differences({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == ()

    def test_a_changed_absent_or_new_part_is_named_with_both_values(self) -> None:
        expected = {"analyser": "porter", "embedder": "mini", "same": "x"}
        actual = {"embedder": "large", "reranker": "ce", "same": "x"}
        assert fingerprint_differences(expected, actual) == (
            "analyser is absent here, was 'porter'",
            "embedder is 'large', was 'mini'",
            "reranker is 'ce', was absent",
        )

    @given(*[st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=4)] * 2)
    def test_there_are_differences_exactly_where_the_systems_differ(
        self, expected: dict[str, str], actual: dict[str, str]
    ) -> None:
        assert bool(fingerprint_differences(expected, actual)) == (expected != actual)
