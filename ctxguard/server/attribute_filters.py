"""OpenAI's filters on attributes, as searches of an index that compares for equality alone.

A comparison becomes the values in the index that satisfy it, `and` the values that satisfy both,
and `or` further searches, unless all its branches compare one key. It fails closed: a passage
without the attribute is not found, whatever the comparison, nor is a fraction.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from ctxguard.core.metadata_filter import Token, tokens
from ctxguard.server.limits import MOST_CONDITIONS, MOST_VALUES
from ctxguard.server.problems import invalid
from ctxguard.server.wire import STRICT

MOST_SEARCHES = 16
"""Searches that one request may need: its queries times the branches of its filter."""

_MOST_KNOWN = 100_000
"""Values of one attribute that are looked through."""

Known = Callable[[str], Collection[Token]]
"""All values that passages have of an attribute."""

Alternative = dict[str, frozenset[Token]]
"""The values that each attribute may have."""

_Value = str | int | float | bool


@with_config(STRICT)
class AttributeComparison(TypedDict):
    """A condition on one attribute."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: _Value | Annotated[list[_Value], Field(fail_fast=True)]


@with_config(STRICT)
class Compound(TypedDict):
    """Conditions of which all or any must hold."""

    type: Literal["and", "or"]
    filters: Annotated[
        list["AttributeComparison | Compound"],
        Field(min_length=1, max_length=MOST_CONDITIONS, fail_fast=True),
    ]


Filter = AttributeComparison | Compound

_ORDERS = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}


def alternatives_of(given: Filter, known: Known) -> list[Alternative]:
    """The searches whose results together are what a filter allows.

    Args:
        given: The filter.
        known: Looks an attribute's values up.

    Raises:
        Problem: it needs too many searches or values, or a comparison has a value of another type.
    """
    if _size(given) > MOST_CONDITIONS:
        raise invalid(f"the filter has more than {MOST_CONDITIONS} conditions")
    return _alternatives(given, known)


def _alternatives(given: Filter, known: Known) -> list[Alternative]:
    if given["type"] != "and" and given["type"] != "or":
        return [{given["key"]: _values(given, known)}]
    branches = [_alternatives(each, known) for each in given["filters"]]
    if given["type"] == "or":
        found = _united([alternative for branch in branches for alternative in branch])
    else:
        found = [{}]
        for branch in branches:
            found = [_both(one, other) for one in found for other in branch]
            _check(len(found))
    _check(len(found))
    return found


def holds(given: Filter, attributes: object) -> bool:
    """Whether a passage satisfies a filter: by any value of a list, or for `ne` by all."""
    if given["type"] == "and" or given["type"] == "or":
        each_holds = [holds(each, attributes) for each in given["filters"]]
        return all(each_holds) if given["type"] == "and" else any(each_holds)
    value = attributes.get(given["key"]) if isinstance(attributes, Mapping) else None
    found = tokens(value)
    if given["type"] in ("ne", "nin"):
        return bool(found) and set(_tokens(given)).isdisjoint(found)
    return not _values(given, lambda _: found).isdisjoint(found)


def _size(given: Filter) -> int:
    if given["type"] != "and" and given["type"] != "or":
        return 1
    return sum([_size(each) for each in given["filters"]])


def _values(given: AttributeComparison, known: Known) -> frozenset[Token]:
    kind, wanted = given["type"], _tokens(given)
    if kind in ("eq", "in"):
        return frozenset(wanted)
    values = known(given["key"])
    if len(values) > _MOST_KNOWN:
        raise invalid(f"{given['key'][:80]!r} has too many values for `{kind}`; use `eq` or `in`")
    if kind in ("ne", "nin"):
        found = frozenset(values).difference(wanted)
    else:
        limit, satisfies = given["value"], _ORDERS[kind]
        name = "str" if isinstance(limit, str) else "int"
        found = frozenset(
            (of, value)
            for of, value in values
            if of == name and satisfies(int(str(value), 16) if of == "int" else value, limit)
        )
    if len(found) > MOST_VALUES:
        raise invalid(f"a filter allows more than {MOST_VALUES:,} values; narrow it")
    return found


def _tokens(given: AttributeComparison) -> tuple[Token, ...]:
    """The values that a comparison names.

    Raises:
        Problem: it takes a list and has one value, or the other way round, or cannot compare it.
    """
    kind, value = given["type"], given["value"]
    if (kind in ("in", "nin")) is not isinstance(value, list):
        raise invalid("a filter `in` or `nin` takes a list, and any other one value")
    if kind in _ORDERS and isinstance(value, bool):
        raise invalid(f"a filter `{kind}` takes a number or a text")
    members = value if isinstance(value, list) else [value]
    # 5.0 is 5; no other fraction equals a value of an index.
    whole = [
        int(each) if isinstance(each, float) and each.is_integer() else each for each in members
    ]
    return tokens(whole)


def _united(alternatives: list[Alternative]) -> list[Alternative]:
    """Those that compare one and the same key are one search for the values of all."""
    single: dict[str, frozenset[Token]] = {}
    several: list[Alternative] = []
    for each in alternatives:
        if len(each) == 1:
            ((key, values),) = each.items()
            single[key] = single.get(key, frozenset()) | values
        else:
            several.append(each)
    return [*({key: values} for key, values in single.items()), *several]


def _both(one: Alternative, other: Alternative) -> Alternative:
    shared = {key: one[key] & values for key, values in other.items() if key in one}
    return {**one, **other, **shared}


def _check(n: int) -> None:
    if n > MOST_SEARCHES:
        raise invalid(f"the filter needs more than {MOST_SEARCHES} searches: use fewer `or`")
