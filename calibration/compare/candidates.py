"""Defines the compared settings of retriever and filter, written in words or calibrated. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_K, Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.profile.schema import Profile

SPEC = (
    "comma-separated: a route (lexical, dense, hybrid, or one of them with +rerank), "
    "reciprocal_rank[:CONSTANT], convex[:DENSE_SHARE] or ranker, k=N, min_ratio=R, rerank=MODEL"
)
"""The syntax of a candidate's settings."""

_RERANK = "+rerank"
_FUSIONS = {"reciprocal_rank": "constant", "convex": "weight", "ranker": ""}
"""The fusion methods, each with the setting that may follow a colon."""


@dataclass(frozen=True)
class Candidate:
    """A way to rank passages and cut the ranking.

    Attributes:
        name: Distinct in a comparison. A later comparison is checked against the saved
            candidate of the same name.
        fusion: No effect on a route with one leg.
        reranker: Name or folder of the CrossEncoder, if the route reranks; None for the one that
            the comparison was given.
        profile_id: Of the profile it comes from; None if it was written by hand.
        source: The retriever or run that ranks, by name; None for the index.
    """

    name: str
    policy: Policy
    route: Route = Route.HYBRID
    fusion: Fusion = Fusion()  # noqa: RUF009  frozen
    reranker: str | None = None
    profile_id: str | None = None
    source: str | None = None

    @property
    def stages(self) -> tuple[Route, Fusion, str | None, str | None]:
        """The settings that determine the ranking: route, fusion, reranker and source."""
        fusion = self.fusion if _fuses(self.route) else Fusion()
        return self.route, fusion, self.reranker, self.source

    def describe(self) -> dict[str, Any]:
        """Return all settings, as JSON."""
        route, fusion, reranker, source = self.stages
        return {
            "route": route.value,
            "fusion": asdict(fusion) if _fuses(route) else None,
            "reranker": reranker,
            "source": source,
            "policy": asdict(self.policy),
            "profile_id": self.profile_id,
        }


def parse_candidates(
    text: str, ks: Sequence[int] = (DEFAULT_K,), source: str | None = None
) -> tuple[Candidate, ...]:
    """Parse ``NAME=SPEC`` into candidates; see ``SPEC``. The route is ``hybrid`` unless given.

    Args:
        ks: Used if the spec names no k: one candidate for each, with the k in its name if there
            are several.
        source: The retriever or run that ranks, whose only route is ``external``; None for the
            index.

    Raises:
        ConfigurationError: a part cannot be read, is given twice, or has no effect.

    >>> [wide] = parse_candidates("wide=hybrid,convex:0.7,k=8")
    >>> wide.name, wide.route.value, wide.fusion.weight, wide.policy.k
    ('wide', 'hybrid', 0.7, 8)
    """
    name, equals, spec = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigurationError(
            f"the candidate {text!r} is not NAME=SPEC, such as wide=hybrid,k=8"
        )
    settings: dict[str, Any] = {}
    for part in spec.split(","):
        setting, value = _part(part.strip(), text)
        if setting in settings:
            raise ConfigurationError(f"the candidate {text!r} gives its {setting} twice")
        settings[setting] = value
    if source is not None and (stages := settings.keys() - {"k", "min_ratio"}):
        raise ConfigurationError(
            f"the candidate {text!r} gives its {min(stages)}, but a retriever of your own and a "
            "run have no stages to choose; give k and min_ratio, or an index"
        )
    route: Route = settings.get("route", Route.HYBRID if source is None else Route.EXTERNAL)
    if "reranker" in settings and not route.value.endswith(_RERANK):
        route = Route(route.value + _RERANK)
    if "fusion" in settings and not _fuses(route):
        raise ConfigurationError(
            f"the candidate {text!r} fuses, but its route {route.value!r} has only one leg"
        )
    fusion: Fusion = settings.get("fusion", Fusion())
    if settings.get("min_ratio") and route is Route.HYBRID and fusion.kind is ScoreKind.RANK:
        raise ConfigurationError(
            f"the candidate {text!r} filters by min_ratio, but reciprocal-rank scores carry only "
            "order; add convex or ranker, or remove min_ratio"
        )
    candidate = Candidate(
        name=name,
        policy=RatioPolicy(k=settings.get("k", ks[0]), min_ratio=settings.get("min_ratio", 0.0)),
        route=route,
        fusion=fusion,
        reranker=settings.get("reranker"),
        source=source,
    )
    return (candidate,) if "k" in settings else at_each_k((candidate,), ks)


def _fuses(route: Route) -> bool:
    return route in (Route.HYBRID, Route.HYBRID_RERANK)


def _part(part: str, text: str) -> tuple[str, object]:
    """Parse one setting of a spec and its value."""
    if part in {route.value for route in Route if route is not Route.EXTERNAL}:
        return "route", Route(part)
    word, _, argument = part.partition(":")
    if word in _FUSIONS and (argument == "" or _FUSIONS[word]):
        field, method = _FUSIONS[word], cast(Any, word)
        number = _number(argument, part, text, whole=field == "constant") if argument else None
        return "fusion", Fusion(method) if number is None else Fusion(method, **{field: number})
    word, equals, argument = part.partition("=")
    if equals and word == "k":
        return "k", _number(argument, part, text, whole=True)
    if equals and word == "min_ratio":
        return "min_ratio", _number(argument, part, text)
    if equals and word == "rerank" and argument:
        return "reranker", argument
    raise ConfigurationError(f"{part!r} in the candidate {text!r} cannot be read; write {SPEC}")


def _number(value: str, part: str, text: str, *, whole: bool = False) -> Any:
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        what = "whole number" if whole else "number"
        raise ConfigurationError(
            f"{part!r} in the candidate {text!r} needs a {what}, not {value!r}"
        )
    return number


def default_candidates(*, reranked: bool = False) -> tuple[Candidate, ...]:
    """Return each leg, each fusion of both and, if ``reranked``, a reranked one, at a fixed k."""
    fixed = RatioPolicy()
    candidates = (
        Candidate("lexical", fixed, Route.LEXICAL),
        Candidate("dense", fixed, Route.DENSE),
        Candidate("reciprocal_rank", fixed, Route.HYBRID, Fusion()),
        Candidate("convex:0.5", fixed, Route.HYBRID, Fusion("convex", weight=0.5)),
        Candidate("ranker", fixed, Route.HYBRID, Fusion("ranker")),
        Candidate("rerank", fixed, Route.HYBRID_RERANK),
    )
    return candidates if reranked else candidates[:-1]


def from_profile(name: str, profile: Profile, source: str | None = None) -> Candidate:
    """Build a candidate from the policy and fusion of the profile's route with most stages."""
    # Routes are declared in order; the one with the most stages is first.
    route = next((route for route in Route if route in profile.routes), None)
    if route is None:
        raise ConfigurationError(f"the profile {name!r} has no route: nothing to compare")
    return Candidate(
        name=name,
        policy=profile.routes[route].policy,
        route=route,
        fusion=profile.fusion,
        profile_id=profile.profile_id,
        source=source,
    )


def at_each_k(candidates: Sequence[Candidate], ks: Sequence[int]) -> tuple[Candidate, ...]:
    """Return each candidate at each k, with the k in its name if there are several.

    >>> [candidate.name for candidate in at_each_k(default_candidates()[:1], [3, 8])]
    ['lexical@3', 'lexical@8']
    """
    return tuple(
        replace(
            each,
            name=each.name if len(ks) == 1 else f"{each.name}@{k}",
            policy=replace(each.policy, k=k, min_keep=min(each.policy.min_keep, k)),
        )
        for each in candidates
        for k in ks
    )
