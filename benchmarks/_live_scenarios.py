"""What is simulated: traffic of a kind, how it is monitored, and when people label and look."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from benchmarks._live_service import Pick, Setting
from benchmarks._live_traffic import DAY_SECONDS, EXACT, TENANTS, Host, JudgeErrors, Shape
from ctxguard.monitor.judging.budget import BudgetLimits

_STEPS = 10


class Change(NamedTuple):
    """From a step on the judge errs otherwise.

    Attributes:
        step: From 1.
        errors: From then on.
        is_silent: Whether it keeps its name and version.
    """

    step: int
    errors: JudgeErrors
    is_silent: bool


@dataclass(frozen=True)
class Scenario:
    """Some traffic, how it is monitored, and when people label and look.

    Attributes:
        name: In the tables.
        judge: How it errs.
        shape: Of the traffic.
        setting: How it is monitored.
        picks: What people label, by step.
        looks: After which steps the figures are scraped; the last one always.
        look_after_each_pick: Whether they are scraped after each pick as well.
        down: Steps in which the judge is down.
        locked: Steps at whose end another process holds the store's lock.
        changed: How the judge changes; None if it stays.
        steps: In how many parts the traffic is served, judged and cleaned.
    """

    name: str
    judge: JudgeErrors = field(default_factory=JudgeErrors)
    shape: Shape = field(default_factory=Shape)
    setting: Setting = field(default_factory=Setting)
    picks: tuple[Pick, ...] = ()
    looks: tuple[int, ...] = ()
    look_after_each_pick: bool = False
    down: tuple[int, ...] = ()
    locked: tuple[int, ...] = ()
    changed: Change | None = None
    steps: int = _STEPS


GOOD = JudgeErrors(0.95, 0.98)
REFUSING = JudgeErrors(0.85, 0.90, refuses_relevant=0.01, refuses_others=0.08)
WORSE = JudgeErrors(0.70, 0.80)
FALLING = Shape(precision=(0.8, 0.4))
DAYS_AND_NIGHTS = Shape(busy=3.0, busy_precision=0.4, precision=(0.75, 0.75))
UNEQUAL = replace(DAYS_AND_NIGHTS, seconds=1_200.0, busy=6.0)
CAPPED = Setting(rate=0.5, max_per_second=1.0, window_seconds=240.0)
MONTHS = replace(FALLING, seconds=60 * DAY_SECONDS)
WEEKLY = Setting(window_seconds=6 * DAY_SECONDS)
AHEAD = (Host(0.7), Host(0.3, ahead_seconds=3 * DAY_SECONDS))
LATE = (Host(0.7), Host(0.3, is_late=True))
ONCE = (Pick(4, 300),)
MIDWAY = (Pick(2, 300),)
MIDWAY_AND_LAST = (Pick(2, 250), Pick(4, 250))
_scenario = partial(Scenario, steps=4)

_NAMED = (
    _scenario("steady, good judge", GOOD, picks=ONCE),
    _scenario("steady", picks=ONCE),
    _scenario("steady, whole requests", picks=(Pick(4, 300, whole=True),)),
    Scenario("drift", shape=FALLING, picks=(Pick(4, 250), Pick(7, 250), Pick(10, 250)), looks=(9,)),
    _scenario("popular repeats", shape=Shape(popular=12), picks=ONCE),
    _scenario("sessions", shape=Shape(session_length=5), picks=ONCE),
    Scenario(
        "rate limit, few labels",
        shape=UNEQUAL,
        setting=CAPPED,
        picks=tuple(Pick(10, n) for n in (150, 150, 300)),
        look_after_each_pick=True,
    ),
    Scenario(
        "rate limit and budget",
        GOOD,
        shape=UNEQUAL,
        setting=replace(CAPPED, budget=BudgetLimits(calls_per_hour=8_000)),
        picks=(Pick(10, 400),),
    ),
    _scenario(
        "a lower rate midway",
        shape=FALLING,
        setting=Setting(0.08, later_rate=0.02),
        picks=MIDWAY_AND_LAST,
    ),
    Scenario("two days", shape=FALLING, picks=(Pick(1, 250), Pick(10, 250))),
    Scenario(
        "retention",
        shape=MONTHS,
        setting=WEEKLY,
        picks=(Pick(2, 400), Pick(10, 400)),
        looks=(4, 8),
    ),
    Scenario(
        "outage",
        shape=FALLING,
        picks=(Pick(5, 250), Pick(10, 250)),
        looks=(7,),
        down=(7, 8),
        locked=(3, 9),
    ),
    _scenario("a third not graded", picks=(Pick(4, 450, graded=0.67),)),
    _scenario("abstention", shape=Shape(abstention=0.3), picks=MIDWAY),
    _scenario("grades 0 to 3", shape=Shape(top_grade=3), picks=MIDWAY),
    _scenario("refusals", REFUSING, picks=MIDWAY),
    _scenario("a new judge", changed=Change(3, GOOD, False), picks=MIDWAY_AND_LAST, looks=(3,)),
    _scenario(
        "a judge that changes silently",
        changed=Change(3, WORSE, True),
        picks=MIDWAY_AND_LAST,
        looks=(3,),
    ),
    _scenario(
        "a clock three days ahead", shape=replace(FALLING, hosts=AHEAD), picks=MIDWAY_AND_LAST
    ),
    _scenario("a host stored late", shape=replace(FALLING, hosts=LATE), picks=MIDWAY_AND_LAST),
    _scenario(
        "both tenants graded",
        shape=Shape(tenant_precision=0.2),
        picks=(Pick(4, 300, tenants=TENANTS),),
    ),
    _scenario(
        "one tenant graded",
        shape=Shape(tenant_precision=0.2),
        picks=(Pick(4, 300, tenants=TENANTS[:1]),),
    ),
    _scenario("lost in bursts", shape=DAYS_AND_NIGHTS, setting=Setting(lost=0.5), picks=ONCE),
    _scenario("nearly all relevant", shape=Shape(quality=1.2), picks=(Pick(4, 100),)),
    _scenario("all relevant", shape=Shape(quality=2.0), picks=(Pick(4, 100),)),
    Scenario("200 grades by day 7", picks=(Pick(7, 200),), looks=(8,)),
    Scenario("exact judge", EXACT, FALLING, looks=(3,)),
    Scenario("exact judge, retention", EXACT, MONTHS, WEEKLY),
)

CROSS_SEED = 24
"""Fixed before anything was drawn."""

_Levels = dict[str, dict[str, dict[str, Any]]]
_SHAPES: _Levels = {
    "rhythm": {
        "steady": {},
        "days and nights": {"busy": 3.0, "busy_precision": 0.4, "precision": (0.75, 0.75)},
        "falling": {"precision": (0.8, 0.4)},
        "popular": {"popular": 12},
    },
    "abstention": {"": {}, "abstains": {"abstention": 0.3}},
    "clocks": {"": {}, "ahead": {"hosts": AHEAD}, "late": {"hosts": LATE}},
    "tenants": {
        "": {},
        "both tenants": {"tenant_precision": 0.2, "graded": TENANTS},
        "one tenant": {"tenant_precision": 0.2, "graded": TENANTS[:1]},
    },
}
_SETTINGS: _Levels = {
    "loss": {"": {}, "losses": {"lost": 0.5}},
    "rates": {
        "": {},
        "lower rate midway": {"rate": 0.08, "later_rate": 0.02},
        "lower rate by day": {"rate": 0.08, "rate_by_day": 0.03},
    },
}
_REFUSALS = {"": JudgeErrors(), "refusals": REFUSING}
_CHANGES = {"": None, "new judge": False, "silent change": True}


def crossed(n: int, seed: int = CROSS_SEED) -> tuple[Scenario, ...]:
    """Draw different cells of the cross of all of these."""
    rng = random.Random(seed)
    found: dict[str, Scenario] = {}
    while len(found) < n:
        shape, shape_name = _drawn(_SHAPES, rng)
        setting, setting_name = _drawn(_SETTINGS, rng)
        refusal, change = rng.choice(list(_REFUSALS)), rng.choice(list(_CHANGES))
        tenants: tuple[str, ...] | None = shape.pop("graded", None)
        errors, is_silent = _REFUSALS[refusal], _CHANGES[change]
        worse = errors._replace(sensitivity=0.75, specificity=0.8)
        name = ", ".join(filter(None, [*shape_name, *setting_name, refusal, change]))
        found[name] = _scenario(
            name,
            errors,
            Shape(**shape),
            Setting(**setting),
            picks=tuple([replace(pick, tenants=tenants) for pick in MIDWAY_AND_LAST]),
            looks=(3,),
            changed=None if is_silent is None else Change(3, worse, is_silent),
        )
    return tuple(found.values())


def _drawn(tables: _Levels, rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    names = [rng.choice(list(table)) for table in tables.values()]
    chosen = [table[name] for table, name in zip(tables.values(), names, strict=True)]
    return {key: value for one in chosen for key, value in one.items()}, names


DRAWN = crossed(10)
SCENARIOS = _NAMED + DRAWN

POSTGRESQL = ("steady", "two days", "retention", DRAWN[0].name)
"""The scenarios that are run on PostgreSQL as well, by name."""
