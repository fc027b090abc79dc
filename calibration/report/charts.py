"""The charts of a calibration report."""

from calibration.curve import Curve
from calibration.report.data import Reliability, RouteReport
from calibration.report.svg import Axis, Chart, spanning
from ctxguard.core.interval import Interval


def recall_by_kept(route: RouteReport) -> str:
    """Draw recall against passages kept: the first k, what is served today, and the choice."""
    results, names = route.summary.results, route.summary.results.policies
    marked = {name: [results.of(name, m).mean for m in ("kept", "recall")] for name in names}
    line = [(float(at.k), at.recall.value) for at in route.today.points]
    known = [(k, recall) for k, recall in line if recall is not None]
    kept, recalls = ([own[i] for own in marked.values()] for i in (0, 1))
    most = max([2.0 * route.summary.serving_k, *(each.value or 0.0 for each in kept)])
    shown = [(k, recall) for k, recall in known if k <= most]
    chart = Chart(
        spanning("passages kept per query", [most]),
        _around("recall", [*recalls, *(Interval(y, None, None, 0) for _, y in shown)]),
        "Recall against the passages kept: today's first passages and the chosen policy",
    )
    chart.line(shown, "grey", "first k, for every k")
    (today, chosen), others = names[:2], names[2:]
    for place, name in enumerate(others):
        chart.point(
            [each.value for each in marked[name]],
            "grey",
            "dot",
            "" if place else "other policies",
        )
    chart.point(marked[today], "orange", "square", f"today: first {route.summary.serving_k}")
    chart.point(marked[chosen], "blue", "circle", "chosen policy")
    return chart.render()


def utility_by_k(route: RouteReport) -> str:
    """Draw strict UDCG by k of the first k passages, with the gain and the harm."""
    today = route.today.points
    values = [at.gain.value for at in today] + [-(at.harm.value or 0.0) for at in today]
    chart = Chart(
        Axis("k, the most passages in the context", 1.0, max(float(len(today)), 2.0)),
        spanning("strict UDCG per query", values),
        "Strict UDCG by size of context, with gain and harm apart",
    )
    chart.level(0.0)
    for name, colour, sign in (("gain", "green", 1.0), ("harm", "red", -1.0)):
        points = [(float(at.k), sign * (getattr(at, name).value or 0.0)) for at in today]
        chart.line(points, colour, f"{name}, first k")
    _curve(chart, route.today, "orange", "UDCG, first k")
    return chart.render()


def _curve(chart: Chart, curve: Curve, colour: str, name: str) -> None:
    at_k = [(float(at.k), at.udcg_strict) for at in curve.points]
    chart.line([(k, each.value or 0.0) for k, each in at_k], colour, name)
    for k, each in at_k:
        chart.point([k, each], colour, "dot")


def reliability(data: Reliability) -> str:
    """Draw the share relevant against P(relevant)."""
    chart = Chart(
        Axis("P(relevant)", 0.0, 1.0),
        Axis("share relevant", 0.0, 1.0),
        "Share of relevant candidates against the predicted probability",
    )
    chart.line([(0.0, 0.0), (1.0, 1.0)], "grey", "perfectly calibrated")
    for place, each in enumerate(each for each in data.bins if each.mean_probability is not None):
        name = "" if place else "candidates, by bin of P"
        chart.point([each.mean_probability, each.relevant], "blue", "circle", name)
    return chart.render()


def _around(label: str, found: list[Interval]) -> Axis:
    """Make an axis of a share that leaves out the empty part below, as far as it is large."""
    known = [end for each in found for end in (each.value, *(each.bounds or ())) if end is not None]
    low = min(known, default=0.0)
    return Axis(label, max(round(low - 0.15, 1), 0.0) if low > 0.3 else 0.0, 1.0)
