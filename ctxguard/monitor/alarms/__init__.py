"""Alarms: detect that a profile's promises no longer hold, and act on it.

``ecusum`` collects evidence of a rise, ``reference`` holds the values that losses are compared
with, ``decision`` decides for one route and loss whether to ring, ``state`` holds the active
alarms, and ``feed`` reads judged requests from the store, logs alarms and switches to the safe
policy.
"""

from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.decision import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.feed import act_on
from ctxguard.monitor.alarms.reference import ReferenceKind
from ctxguard.monitor.alarms.state import AlarmReport, AlarmState

__all__ = [
    "Alarm",
    "AlarmKind",
    "AlarmReport",
    "AlarmState",
    "LossMonitor",
    "PromisedLoss",
    "ReferenceKind",
    "act_on",
]
