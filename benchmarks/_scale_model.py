"""From unit costs to a system: pure arithmetic whose every input has a name.

Nothing here was run. Bytes and milliseconds come from ``Units``; what a person chooses is in
``Machine`` and ``Load``; what engines document about themselves is named where it is used. What
neither says is None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxguard.monitor.sampling.inclusion import DEFAULT_RATES, JudgingRates
from ctxguard.monitor.store.types import DEFAULT_MAX_BYTES

DAY_SECONDS = 86_400.0
FLOAT32, HALF, BINARY = 4.0, 2.0, 0.125
"""Bytes a dimension."""
CODE_SHARE = 1.0 / 16.0
"""Of the vectors' bytes: the codes that the embedded index adds above 20,000 passages."""
QDRANT_FACTOR = 1.5
"""Qdrant's documentation, "Capacity planning": memory = vectors · dimension · 4 bytes · 1.5."""
_LEVELS = ("none", "full")
PROMETHEUS_BYTES = 2.0
"""Prometheus' documentation, "Storage": 1 to 2 bytes a sample on disk; the upper one."""


@dataclass(frozen=True)
class Index:
    """Bytes of one passage in a saved index, and milliseconds of one core.

    Attributes:
        words: In a passage, on average.
        dimension: Of a vector.
        vectors, postings, passages: Bytes that every search reads.
        terms: Bytes of the passage's terms, from which an update is made, and signals.
        pieces: Bytes that signals add.
        encode_ms: Encoding a passage.
        build_ms: Building the index, encoding included, by level of signals.
        query_ms: Encoding a query.
        search_ms: A search of both legs without encoding and signals, of ``searched`` passages.
        search_ms_per_million: What each million of passages adds.
        signals_ms: Signals of a search by the level ``full``.
    """

    words: float
    dimension: int
    vectors: float
    postings: float
    passages: float
    terms: float
    pieces: float
    encode_ms: float
    build_ms: Mapping[str, float]
    query_ms: float
    search_ms: float
    searched: int
    search_ms_per_million: float
    signals_ms: float

    def bytes_of(self, level: str) -> float:
        """Bytes of a passage by the level of signals: none or full."""
        found = self.vectors + self.postings + self.passages + self.terms
        return found + self.pieces if level == "full" else found

    def search_ms_of(self, passages: float) -> float:
        """A search of so many passages; of fewer than were measured, that of these."""
        more = max(0.0, passages - self.searched)
        return self.search_ms + self.search_ms_per_million * more / 1e6

    @property
    def resident(self) -> float:
        """Bytes of a passage that a search without signals reads: vectors, codes, postings."""
        return self.vectors * (1.0 + CODE_SHARE) + self.postings


@dataclass(frozen=True)
class Queue:
    """The sample store on one database, with one client.

    Attributes:
        sample_bytes: On disk, of a sample with its payload, indexes included.
        verdict_bytes: On disk, of a verdict.
        append_ms, claim_ms, finish_ms: A sample, in batches of 100.
        scan_us: Reading a judged request for a report.
    """

    sample_bytes: float
    verdict_bytes: float
    append_ms: float
    claim_ms: float
    finish_ms: float
    scan_us: float

    @property
    def per_second(self) -> float:
        """Samples a second that one client writes, claims and finishes in turn."""
        return 1e3 / (self.append_ms + self.claim_ms + self.finish_ms)


@dataclass(frozen=True)
class Units:
    """Every unit cost.

    Attributes:
        index: Of passages and queries.
        guard_ms: The guard around a retriever, with 100 candidates and one list.
        utility_ms: The same with expected utility.
        service_ms: Processor time of a request over HTTP (POST /rerank, 100 documents).
        request_bytes: Memory of a request in flight, its 100 candidates included.
        stores: By database.
        pgvector_bytes: Of a passage's HNSW index (m = 16), by type of vector: vector, halfvec, bit.
        prompt_tokens: Of a verdict's prompt, in word pieces.
        reply_tokens: Of its reply.
        losses_per_sample: Recall losses that a judged request gives, on average.
        guard_series, monitor_series: Time series that a process exports.
        series_bytes: Memory of an active series in Prometheus; None where none was at hand.
    """

    index: Index
    guard_ms: float
    utility_ms: float
    service_ms: float
    request_bytes: float
    stores: Mapping[str, Queue]
    pgvector_bytes: Mapping[str, float]
    prompt_tokens: float
    reply_tokens: float
    losses_per_sample: float
    guard_series: int
    monitor_series: int
    series_bytes: float | None


@dataclass(frozen=True)
class Machine:
    """One machine, and what may be asked of it.

    Attributes:
        cores: Of it.
        memory_bytes: Of it.
        busy: Share of cores and of memory that is used when all is well.
        store_bytes: Disk of one sample store.
        slowest_search_ms: The most that a search may take on one core.
        encode_days: In which a corpus must be encoded.
        call_seconds: One call of a judge.
        calls_at_once: Of one judging process.
        retained_days: Of samples.
        scrape_seconds: Between two scrapes.
        prometheus_days: That Prometheus keeps.
    """

    cores: int = 16
    memory_bytes: float = 128 * 2.0**30
    busy: float = 0.5
    store_bytes: float = 1e12
    slowest_search_ms: float = 100.0
    encode_days: float = 7.0
    call_seconds: float = 1.0
    calls_at_once: int = 4
    retained_days: float = 30.0
    scrape_seconds: float = 15.0
    prometheus_days: float = 15.0

    @property
    def usable_bytes(self) -> float:
        """Memory."""
        return self.memory_bytes * self.busy

    def cores_of(self, per_second: float, milliseconds: float) -> float:
        """Cores that do so much work a second, each busy by ``busy``.

        >>> Machine(busy=0.5).cores_of(1_000.0, 2.0)
        4.0
        """
        return per_second * milliseconds / 1e3 / self.busy


@dataclass(frozen=True)
class Load:
    """What the system is asked.

    Attributes:
        passages: In the index.
        requests_per_second: All day.
        judged_per_day: Requests; as many are sampled.
        candidates, kept: Of a request.
        no_hit: Share of the requests that are served nothing relevant.
        rates: Of judging.
    """

    passages: float
    requests_per_second: float = 50_000.0
    judged_per_day: float = 20_000.0
    candidates: int = 100
    kept: int = 5
    no_hit: float = 0.1
    rates: JudgingRates = field(default=DEFAULT_RATES)

    @property
    def sampling_rate(self) -> float:
        """Share of the requests."""
        return self.judged_per_day / (self.requests_per_second * DAY_SECONDS)

    @property
    def verdicts(self) -> float:
        """Of a judged request, on average.

        All that was kept, and what of the rest is judged by ``rates``; of the retriever's first
        ``baseline_k``, half are taken to be among the kept.

        >>> Load(1.0, candidates=100, kept=100).verdicts
        100.0
        """
        dropped = self.candidates - self.kept
        first = min(dropped, self.rates.baseline_k / 2.0)
        found = float(self.kept)
        for has_hit, share in ((True, 1.0 - self.no_hit), (False, self.no_hit)):
            for in_baseline, n in ((True, first), (False, dropped - first)):
                found += (
                    share
                    * n
                    * self.rates.dropped_probability(has_hit=has_hit, in_baseline=in_baseline)
                )
        return found


@dataclass(frozen=True)
class Engine:
    """One way to hold the vectors.

    Attributes:
        name: Of it.
        bytes: That a search wants in memory; None where nobody has said.
        machines: By memory alone, ≥ 1; None where it is not known.
        search_ms: On one core; None where it was not measured at this size.
        source: Of the bytes.
        is_coded: Whether a search compares binary codes first; what that loses was not measured.
    """

    name: str
    bytes: float | None
    machines: int | None
    search_ms: float | None
    source: str
    is_coded: bool = False


def bytes_text(size: float | None) -> str:
    """A number of bytes in decimal units, for a table; a dash where it is not known.

    >>> bytes_text(153.6e9), bytes_text(2.3e13), bytes_text(8.3e6), bytes_text(None)
    ('154 GB', '23.0 TB', '8.30 MB', '–')
    """
    if size is None:
        return "–"
    unit, name = next(
        (unit, name)
        for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "B"))
        if size >= unit or unit == 1.0
    )
    digits = max(0, 2 - math.floor(math.log10(max(size / unit, 1.0))))
    return f"{size / unit:.{digits}f} {name}"


def count_text(n: float) -> str:
    """A number by its first two digits, for a text.

    >>> count_text(44_430_118.2), count_text(81_925.1)
    ('44 million', '82 thousand')
    """
    unit, name = (1e6, "million") if n >= 1e6 else (1e3, "thousand")
    digits = max(0, 1 - math.floor(math.log10(max(n / unit, 1.0))))
    return f"{n / unit:.{digits}f} {name}"


def vector_bytes(passages: float, dimension: int) -> dict[str, float]:
    """Bytes of vectors alone, by form.

    >>> vector_bytes(1_000, 384)
    {'float32': 1536000.0, 'halfvec': 768000.0, 'binary': 48000.0}
    """
    forms = {"float32": FLOAT32, "halfvec": HALF, "binary": BINARY}
    return {name: passages * dimension * each for name, each in forms.items()}


def engines(units: Units, passages: float, machine: Machine) -> list[Engine]:
    """What each engine needs for an index of so many passages."""

    def engine(
        name: str,
        size: float | None,
        source: str,
        *,
        search_ms: float | None = None,
        is_coded: bool = False,
    ) -> Engine:
        machines = None if size is None else max(1, math.ceil(size / machine.usable_bytes))
        return Engine(name, size, machines, search_ms, source, is_coded)

    index = units.index
    float32 = vector_bytes(passages, index.dimension)["float32"]
    binary = vector_bytes(passages, index.dimension)["binary"]
    return [
        engine(
            "embedded",
            passages * index.resident,
            "measured; searches scaled by size",
            search_ms=index.search_ms_of(passages),
        ),
        *[
            engine(
                f"pgvector, {name}",
                passages * each,
                "HNSW index, measured",
                is_coded=name == "bit",
            )
            for name, each in units.pgvector_bytes.items()
        ],
        engine("Qdrant", float32 * QDRANT_FACTOR, "Qdrant: capacity planning"),
        engine(
            "Qdrant, binary", binary * QDRANT_FACTOR, "the same factor, codes alone", is_coded=True
        ),
        engine("Milvus, DiskANN", None, "not measured"),
    ]


def choice(found: Sequence[Engine], machine: Machine, most_machines: int = 16) -> str:
    """The simplest engine that holds the index, without binary codes.

    One machine with the embedded index, one PostgreSQL, up to ``most_machines`` of Qdrant, and
    Milvus beyond.
    """
    for engine in found:
        most = most_machines if engine.name.startswith("Qdrant") else 1
        is_quick = engine.search_ms is None or engine.search_ms <= machine.slowest_search_ms
        is_held = engine.machines is not None and engine.machines <= most
        if is_held and is_quick and not engine.is_coded:
            return engine.name
    return "Milvus"


def embedded_limits(units: Units, machine: Machine) -> dict[str, float]:
    """Passages that the embedded index holds on one machine, by memory and by time."""
    index = units.index
    return {
        "by_memory": machine.usable_bytes / index.resident,
        "by_time": index.searched
        + 1e6 * max(0.0, machine.slowest_search_ms - index.search_ms) / index.search_ms_per_million,
    }


def serving(units: Units, load: Load, machine: Machine) -> dict[str, float]:
    """Cores for requests, at ``Machine.busy``, and memory of those in flight.

    So many are in flight as come in the time of the slowest search (Little's law).
    """
    per_second = load.requests_per_second
    cores = {
        "guard_cores": machine.cores_of(per_second, units.guard_ms),
        "utility_cores": machine.cores_of(per_second, units.utility_ms),
        "service_cores": machine.cores_of(per_second, units.service_ms),
        "query_encoding_cores": machine.cores_of(per_second, units.index.query_ms),
        "search_cores": machine.cores_of(per_second, units.index.search_ms),
        "signals_cores": machine.cores_of(per_second, units.index.signals_ms),
    }
    in_flight = per_second * machine.slowest_search_ms / 1e3
    return {
        **cores,
        "corpus_core_days": load.passages * units.index.encode_ms / 1e3 / DAY_SECONDS,
        "in_flight": in_flight,
        "bytes_in_flight": in_flight * units.request_bytes,
    }


def storing(queue: Queue, load: Load, machine: Machine) -> dict[str, float]:
    """The sample store of one fleet on one database.

    ``days_by_default`` is after how long the default limit of payloads deletes the oldest.
    """
    per_day = queue.sample_bytes + load.verdicts * queue.verdict_bytes
    bytes_per_day = load.judged_per_day * per_day
    by_rate = queue.per_second * DAY_SECONDS * machine.busy
    by_bytes = machine.store_bytes / (per_day * machine.retained_days)
    # A report reads all judged requests that are kept, and is made every 15 seconds.
    by_report = machine.scrape_seconds * machine.busy * 1e6 / queue.scan_us / machine.retained_days
    return {
        "sampling_rate": load.sampling_rate,
        "rows_per_day": load.judged_per_day,
        "verdicts_per_day": load.judged_per_day * load.verdicts,
        "bytes_per_day": bytes_per_day,
        "bytes_retained": bytes_per_day * machine.retained_days,
        "days_by_default": DEFAULT_MAX_BYTES / (load.judged_per_day * queue.sample_bytes),
        "most_per_day_by_rate": by_rate,
        "most_per_day_by_bytes": by_bytes,
        "most_per_day_by_report": by_report,
        "most_per_day": min(by_rate, by_bytes, by_report),
        "stores": math.ceil(load.judged_per_day / min(by_rate, by_bytes, by_report)),
    }


def judging(units: Units, load: Load, machine: Machine) -> dict[str, float]:
    """Calls, tokens and processes; a price for a million tokens makes tokens a cost."""
    calls = load.judged_per_day * load.verdicts
    per_process = machine.calls_at_once / machine.call_seconds * DAY_SECONDS * machine.busy
    return {
        "verdicts_per_request": load.verdicts,
        "calls_per_day": calls,
        "processes": math.ceil(calls / per_process),
        "input_mtokens_per_day": calls * units.prompt_tokens / 1e6,
        "output_mtokens_per_day": calls * units.reply_tokens / 1e6,
    }


def cost_per_day(judged: Mapping[str, float], input_price: float, output_price: float) -> float:
    """What a day of judging costs at prices of a million tokens, in their currency.

    >>> cost_per_day({"input_mtokens_per_day": 10.0, "output_mtokens_per_day": 1.0}, 0.5, 2.0)
    7.0
    """
    return (
        judged["input_mtokens_per_day"] * input_price
        + judged["output_mtokens_per_day"] * output_price
    )


def watching(units: Units, processes: float, machine: Machine) -> dict[str, float | None]:
    """What one Prometheus holds that scrapes every process of the fleet."""
    series = processes * units.guard_series + units.monitor_series
    per_second = series / machine.scrape_seconds
    memory = None if units.series_bytes is None else series * units.series_bytes
    return {
        "processes": processes,
        "series": series,
        "samples_per_second": per_second,
        "disk_bytes": per_second * DAY_SECONDS * machine.prometheus_days * PROMETHEUS_BYTES,
        "memory_bytes": memory,
        "most_processes": None
        if units.series_bytes is None
        else machine.usable_bytes / units.series_bytes / units.guard_series,
    }


@dataclass(frozen=True)
class Break:
    """One part, and how many times what one unit of it holds is asked of it.

    Attributes:
        part: What breaks.
        unit: What one of it is.
        times: Needed / what one holds; above 1 it does not hold.
        mend: What is done about it.
    """

    part: str
    unit: str
    times: float
    mend: str


def breaks(units: Units, load: Load, machine: Machine, queue: Queue) -> list[Break]:
    """What breaks when all of it is put on one of each, first what breaks first."""
    served, judged = serving(units, load, machine), judging(units, load, machine)
    stored = storing(queue, load, machine)
    watched = watching(units, served["service_cores"], machine)
    limits = embedded_limits(units, machine)
    cores = machine.cores

    def of_machine(part: str, key: str, mend: str) -> Break:
        return Break(part, f"machine of {cores} cores", served[key] / cores, mend)

    encoding = served["corpus_core_days"] / (cores * machine.encode_days)
    found = [
        Break(
            "embedded index",
            "machine",
            load.passages / min(limits.values()),
            "an engine of several machines",
        ),
        Break(
            "encoding the corpus",
            f"machine of {cores} cores in {machine.encode_days:g} days",
            encoding,
            "GPUs, or more machines",
        ),
        of_machine("encoding queries", "query_encoding_cores", "a GPU service, or a cache"),
        of_machine("signals, full", "signals_cores", "more machines, or fewer candidates"),
        of_machine("guards as HTTP services", "service_cores", "more machines; in process"),
        of_machine("guards in process", "guard_cores", "nothing"),
        Break("judging", "process", judged["processes"], "more monitors on one store"),
        Break(
            "sample store",
            "PostgreSQL",
            load.judged_per_day / stored["most_per_day"],
            "a store for each tenant or region",
        ),
    ]
    if watched["most_processes"]:
        found.append(
            Break(
                "Prometheus",
                "server",
                served["service_cores"] / watched["most_processes"],
                "recording rules, federation",
            )
        )
    return sorted(found, key=lambda one: -one.times)


def extrapolate(units: Units, load: Load, machine: Machine, database: str) -> dict[str, Any]:
    """Everything for one load."""
    queue = units.stores[database]
    found = engines(units, load.passages, machine)
    served = serving(units, load, machine)
    watched = watching(units, served["service_cores"], machine)
    vectors = vector_bytes(load.passages, units.index.dimension)
    saved = {level: load.passages * units.index.bytes_of(level) for level in _LEVELS}
    return {
        "passages": f"{load.passages:,.0f}",
        "vectors": {name: bytes_text(size) for name, size in vectors.items()},
        "saved": {level: bytes_text(size) for level, size in saved.items()},
        "engines": [
            {
                **vars(engine),
                "memory": bytes_text(engine.bytes),
                "by_memory": "–" if engine.machines is None else f"{engine.machines:,}",
            }
            for engine in found
        ],
        "choice": choice(found, machine),
        "serving": {**served, "memory_in_flight": bytes_text(served["bytes_in_flight"])},
        "prometheus": {
            **watched,
            "disk": bytes_text(watched["disk_bytes"]),
            "memory": bytes_text(watched["memory_bytes"]),
        },
        "breaks": [
            {"place": place, **vars(one), "text": _times_text(one.times)}
            for place, one in enumerate(breaks(units, load, machine, queue), start=1)
        ],
    }


def _times_text(times: float) -> str:
    return f"{times:,.0f}" if times >= 10.0 else f"{times:.2g}"
