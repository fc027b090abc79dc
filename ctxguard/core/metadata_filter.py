"""Limits a request to the passages whose metadata meets every condition.

It fails closed: a passage that lacks a field, or whose value cannot be compared, is not allowed.
Pure: no I/O of its own, no clock, no logging; `verified` reads passages, which may run anyone's
code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from ctxguard.core.types import Ranking
from ctxguard.errors import ConfigurationError, FilterViolationError

Scalar = str | int | bool
Allowed = Scalar | list[Scalar] | tuple[Scalar, ...] | set[Scalar] | frozenset[Scalar]

# A bool is an int to Python, and True equals 1; here a value matches its own type only. An integer
# is kept as text: anybody can name integers of one hash, which make a set quadratic.
Token = tuple[str, str | bool]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Where:
    """A filter on metadata: tenant, access list, language.

    Each condition names a field and one or more allowed values. If a passage's field holds a list
    (its groups), any member may satisfy the condition. Values are strings, whole numbers or bools
    and are compared exactly, including type and case: ``"1"`` is not ``1``. A condition with an
    empty list of values allows nothing, which is right for a reader who belongs to no group.

    Args:
        conditions: Conditions on fields whose names are not Python identifiers.
        fields: Conditions on other fields.

    Attributes:
        conditions: Field and tokens of the allowed values, in the order of the fields' names;
            ``allowed`` has the values.

    Raises:
        ConfigurationError: there is no condition, or a value is None, a fraction or a nested
            object. A misunderstood filter must not become no filter.

    >>> where = Where(tenant="a", groups=["staff", "board"])
    >>> where.allows({"tenant": "a", "groups": ["staff"]}), where.allows({"tenant": "a"})
    (True, False)
    """

    conditions: tuple[tuple[str, frozenset[Token]], ...]

    def __init__(self, conditions: Mapping[str, Allowed] | None = None, /, **fields: Allowed):
        given = _merged(conditions, fields)
        if not given:
            raise ConfigurationError(
                "a filter without a condition would let everything through; name a field and its "
                "value, as in Where(tenant='a'), or pass where=None to search unfiltered"
            )
        # Through object.__setattr__, because a filter is frozen.
        object.__setattr__(
            self,
            "conditions",
            tuple([(name, _allowed(name, given[name])) for name in sorted(given)]),
        )

    def __repr__(self) -> str:
        # Names only: the values tell which tenant or person asked.
        return f"Where({', '.join(f'{name}=…' for name in self.fields)})"

    @property
    def digest(self) -> bytes:
        """A digest of the allowed values; no two different filters share one."""
        # Quoted, so that different filters are always written differently.
        written = repr([(name, sorted(allowed)) for name, allowed in self.conditions])
        return blake2b(written.encode(), digest_size=32).digest()

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the compared fields, sorted."""
        return tuple([name for name, _ in self.conditions])

    @property
    def allowed(self) -> dict[str, list[Scalar]]:
        """The allowed values of each field, grouped by type and sorted, for an engine's filter.

        >>> Where(groups=["staff", "board"], level=16).allowed
        {'groups': ['board', 'staff'], 'level': [16]}
        """
        found: dict[str, list[Scalar]] = {}
        for name, allowed in self.conditions:
            pairs = [(kind, int(str(v), 16) if kind == "int" else v) for kind, v in allowed]
            found[name] = [value for _, value in sorted(pairs)]
        return found

    def allows(self, metadata: object) -> bool:
        """Return whether a passage with this metadata may be seen; False if in doubt."""
        try:
            if not isinstance(metadata, Mapping):
                return False
            return all(
                not wanted.isdisjoint(tokens(metadata.get(name)))
                for name, wanted in self.conditions
            )
        except Exception:
            # Metadata is the user's own object, and reading it may fail in any way.
            return False


def verified(ranking: Ranking, where: Where) -> Ranking:
    """Read every passage once and check it against the filter.

    A passage that cannot be read stays a candidate but cannot be served.

    Raises:
        FilterViolationError: the filter forbids a candidate.
    """
    passages: list[Any] = []
    forbidden = 0
    for position in range(len(ranking)):
        try:
            passage = ranking.passages[position]
            metadata = passage.metadata
        except Exception:
            passages.append(None)
            continue
        passages.append(passage)
        forbidden += not where.allows(metadata)
    if forbidden:
        raise FilterViolationError(
            "filter",
            f"{forbidden} of {len(ranking)} candidates do not satisfy the filter on "
            f"{', '.join(map(repr, where.fields))}; the retriever must apply `where` itself and "
            "return each passage's metadata",
        )
    # Read once, so that exactly what was checked is served.
    return replace(ranking, passages=passages)


def tokens(value: object) -> tuple[Token, ...]:
    """Return the tokens that match a field: that of its value, or those of a list's members."""
    return tuple([token for member in _members(value) if (token := _token(member)) is not None])


def _members(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple | set | frozenset) else (value,)


def _token(value: object) -> Token | None:
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return "int", f"{value:x}"
    # str.__str__ makes a plain text of a subclass, such as a member of a StrEnum.
    return ("str", str.__str__(value)) if isinstance(value, str) else None


def _merged(
    conditions: Mapping[str, Allowed] | None, fields: Mapping[str, Allowed]
) -> dict[str, Allowed]:
    conditions = {} if conditions is None else conditions
    if not isinstance(conditions, Mapping):
        raise ConfigurationError(
            f"a filter takes a mapping from fields to values, not a {type(conditions).__name__}"
        )
    repeated = sorted(set(conditions) & set(fields))
    if repeated:
        raise ConfigurationError(f"the filter names the field {repeated[0]!r} twice")
    merged = {**conditions, **fields}
    for name in merged:
        if not isinstance(name, str):
            raise ConfigurationError(f"a field's name must be a string, not {name!r}")
    return merged


def _allowed(name: str, value: Allowed) -> frozenset[Token]:
    allowed = set()
    for member in _members(value):
        token = _token(member)
        if token is None:
            raise ConfigurationError(
                f"the filter on {name!r} has a value of type {type(member).__name__}; use a "
                "string, a whole number, a bool, or a list of these"
            )
        allowed.add(token)
    return frozenset(allowed)
