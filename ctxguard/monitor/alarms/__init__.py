"""Alarms: detect that a profile's promises no longer hold, and act on it.

``ecusum`` collects evidence of a rise, ``reference`` holds the values that losses are compared
with, ``loss_monitor`` joins the two for one route and loss, ``state`` holds the active alarms, and
``monitor`` feeds it from the store, logs alarms and switches to the safe policy.
"""

from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind
from ctxguard.monitor.alarms.loss_monitor import LossMonitor, PromisedLoss
from ctxguard.monitor.alarms.monitor import act_on, switch_to_safe
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
    "switch_to_safe",
]
