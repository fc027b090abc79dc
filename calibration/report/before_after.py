"""Compares each question's context before and after: whether it answers, and what misleads.

Pure. The contexts after are those of a choice in which the question had no part.
"""

from dataclasses import dataclass

import numpy as np

from calibration.calibrate_route import RouteOutcome
from ctxguard.core.types import FloatArray
from ctxguard.measure.rows import BoolArray, IntArray


@dataclass(frozen=True)
class BeforeAfter:
    """Today's contexts and the chosen ones, on the same questions.

    Attributes:
        answered: Before and after, whether each context holds an answer; shape (n_q,) each.
        misleading: Before and after, how many passages mislead in all.
        irrelevant: Before and after, how many passages are not labelled relevant.
        gain: UDCG after less that before, shape (n_q,).
    """

    answered: tuple[BoolArray, BoolArray]
    misleading: tuple[int, int]
    irrelevant: tuple[int, int]
    gain: FloatArray

    @classmethod
    def of(cls, outcome: RouteOutcome) -> "BeforeAfter":
        """Put the choice beside today's contexts; an answer has its question's best grade."""
        pools, today, chosen = outcome.route.measured, outcome.today, outcome.chosen

        def both(marked: BoolArray) -> tuple[IntArray, IntArray]:
            before, after = (
                (np.take_along_axis(marked, option.order, 1) & option.kept).sum(axis=1)
                for option in (today, chosen)
            )
            return before, after

        before, after = both(pools.grades == np.maximum(pools.best_grades[:, :1], 1))
        misleading, irrelevant = both(pools.misleading), both(~pools.relevant)
        return cls(
            (before > 0, after > 0),
            (int(misleading[0].sum()), int(misleading[1].sum())),
            (int(irrelevant[0].sum()), int(irrelevant[1].sum())),
            np.round(chosen.metrics["udcg"] - today.metrics["udcg"], 12),
        )

    @property
    def answers(self) -> dict[str, int]:
        """How many questions keep their answer, gain one and lose it."""
        before, after = self.answered
        return {
            "kept": int((before & after).sum()),
            "gained": int((~before & after).sum()),
            "lost": int((before & ~after).sum()),
        }

    def shown(self) -> dict[str, int]:
        """Choose the questions that a person should see, each question once.

        - ``gains``: of median gain among those that gain an answer; the one of the highest gain if
          none does.
        - ``typical``: of median gain among those that have an answer, before or after.
        - ``loses``: of the lowest gain.
        """
        before, after = self.answered

        def median(wanted: BoolArray) -> int:
            some = np.flatnonzero(wanted if wanted.any() else np.ones_like(wanted))
            return int(some[np.argsort(self.gain[some], kind="stable")][some.size // 2])

        gained = ~before & after
        found = {
            "gains": median(gained) if gained.any() else int(self.gain.argmax()),
            "typical": median(before | after),
            "loses": int(self.gain.argmin()),
        }
        names: dict[int, str] = {}
        for name, row in found.items():
            names.setdefault(row, name)
        return {name: row for row, name in names.items()}
