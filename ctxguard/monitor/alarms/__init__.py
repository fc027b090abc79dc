"""Alarms: detecting that a profile's promises no longer hold, and acting on it.

``loss_monitor`` and ``drift`` detect it, ``state`` holds the active alarms, ``monitor`` feeds it
with what a monitor judges, and ``actions`` logs an alarm and switches to the safe policy.
"""

from ctxguard.monitor.alarms.actions import act_on, switch_to_safe
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.drift import DriftDetector, Reference, Signal, Signals
from ctxguard.monitor.alarms.loss_monitor import LossMonitor, Quantity, loss_monitors
from ctxguard.monitor.alarms.state import AlarmReport, AlarmState

__all__ = [
    "Alarm",
    "AlarmKind",
    "AlarmReport",
    "AlarmState",
    "DriftDetector",
    "LossMonitor",
    "Quantity",
    "Reference",
    "Severity",
    "Signal",
    "Signals",
    "act_on",
    "loss_monitors",
    "switch_to_safe",
]
