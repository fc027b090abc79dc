"""What is simulated: traffic of a kind, how it is monitored, and when people label and look."""

from dataclasses import dataclass, field, replace

from benchmarks._live_service import Pick, Setting
from benchmarks._live_traffic import DAY_SECONDS, Shape
from ctxguard.monitor.judging.budget import BudgetLimits

_STEPS = 10


@dataclass(frozen=True)
class Scenario:
    """Some traffic, how it is monitored, and when people label and look.

    Attributes:
        name: In the tables.
        judge: Its sensitivity and specificity.
        shape: Of the traffic.
        setting: How it is monitored.
        picks: What people label, by step.
        looks: After which steps the figures are scraped; the last one always.
        look_after_each_pick: Whether they are scraped after each pick as well.
        down: Steps in which the judge is down.
        locked: Steps at whose end another process holds the store's lock.
        steps: In how many parts the traffic is served, judged and cleaned.
    """

    name: str
    judge: tuple[float, float] = (0.85, 0.90)
    shape: Shape = field(default_factory=Shape)
    setting: Setting = field(default_factory=Setting)
    picks: tuple[Pick, ...] = ()
    looks: tuple[int, ...] = ()
    look_after_each_pick: bool = False
    down: tuple[int, ...] = ()
    locked: tuple[int, ...] = ()
    steps: int = _STEPS

    @property
    def can_label_anew(self) -> bool:
        """Whether labels change nothing but the estimates, and nothing else is looked at."""
        return bool(self.picks) and not self.down and not self.locked and self.setting.monitors == 1


EXACT = (1.0, 1.0)
GOOD = (0.95, 0.98)
FALLING = Shape(precision=(0.8, 0.4))
LONGER = replace(FALLING, n=24_000)
UNEQUAL = Shape(n=12_000, seconds=1_200.0, precision=(0.75, 0.75), busy=6.0, busy_precision=0.4)
CAPPED = Setting(rate=0.5, max_per_second=1.2, window_seconds=240.0)
TWO_DAYS = ((1, 250), (10, 250))
MONTHS = replace(FALLING, seconds=60 * DAY_SECONDS, n=20_000)
WEEKLY = Setting(window_seconds=6 * DAY_SECONDS)

SCENARIOS = (
    Scenario("steady, good judge", GOOD, picks=(Pick(10, 400),)),
    Scenario("steady", picks=(Pick(10, 400),)),
    Scenario("steady, whole requests", picks=(Pick(10, 400, whole=True),)),
    Scenario("drift", shape=FALLING, picks=(Pick(4, 250), Pick(7, 250), Pick(10, 250)), looks=(9,)),
    Scenario("popular repeats", shape=Shape(popular=12), picks=(Pick(10, 400),)),
    Scenario("sessions", shape=Shape(session_length=5), picks=(Pick(10, 400),)),
    Scenario(
        "rate limit, few labels",
        shape=UNEQUAL,
        setting=CAPPED,
        picks=tuple(Pick(10, n) for n in (150, 150, 300, 600)),
        look_after_each_pick=True,
    ),
    Scenario(
        "rate limit and budget",
        GOOD,
        shape=UNEQUAL,
        setting=replace(CAPPED, budget=BudgetLimits(calls_per_hour=8_000)),
        picks=(Pick(10, 400),),
    ),
    Scenario("two days", shape=LONGER, picks=tuple(Pick(*day) for day in TWO_DAYS)),
    Scenario(
        "retention",
        shape=MONTHS,
        setting=WEEKLY,
        picks=(Pick(3, 400), Pick(20, 400)),
        looks=(8, 15, 19),
        steps=20,
    ),
    Scenario(
        "outage",
        shape=FALLING,
        picks=(Pick(5, 250), Pick(10, 250)),
        looks=(7,),
        down=(7, 8),
        locked=(3, 9),
    ),
    Scenario("a third not graded", picks=(Pick(10, 500, graded=0.67),)),
    Scenario("alarm", picks=(Pick(8, 60, targeted=True), Pick(10, 400))),
    Scenario("two monitors", setting=Setting(monitors=2), picks=(Pick(10, 400),)),
    Scenario("exact judge", EXACT, FALLING, looks=(3,)),
    Scenario("exact judge, retention", EXACT, MONTHS, WEEKLY, steps=20),
    Scenario(
        "audits",
        EXACT,
        shape=Shape(missed=1.0 / 6.0),
        setting=Setting(audit_probability=0.08),
        looks=(3,),
    ),
)


POSTGRESQL = ("steady", "two days", "retention")
"""The scenarios that are run on PostgreSQL as well, by name."""
