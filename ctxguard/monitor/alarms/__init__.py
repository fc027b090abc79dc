"""Alarms: detect that a profile's promises no longer hold, and act on it.

``day`` weighs a day's losses, ``ecusum`` collects evidence of a rise, ``reference`` says what they
are compared with, ``loss_monitor`` joins the three for one route and loss, ``drift`` counts signals
for Prometheus to compare, ``state`` holds the active alarms, ``monitor`` feeds it with what the
store holds, and ``actions`` logs an alarm and switches to the safe policy.
"""

from ctxguard.monitor.alarms.actions import act_on, switch_to_safe
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.drift import Signal, SignalCounts, Signals
from ctxguard.monitor.alarms.loss_monitor import LossMonitor, PromisedLoss, Quantity
from ctxguard.monitor.alarms.reference import ReferenceKind
from ctxguard.monitor.alarms.state import AlarmReport, AlarmState

__all__ = [
    "Alarm",
    "AlarmKind",
    "AlarmReport",
    "AlarmState",
    "LossMonitor",
    "PromisedLoss",
    "Quantity",
    "ReferenceKind",
    "Severity",
    "Signal",
    "SignalCounts",
    "Signals",
    "act_on",
    "switch_to_safe",
]
