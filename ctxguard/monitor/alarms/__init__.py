"""Alarms: when the certificate no longer holds, and what is done then (DESIGN.md §8).

``watches`` and ``drift`` decide when, ``board`` holds what is raised, ``actions``, ``webhook`` and
``switching`` act on it, ``labelling`` says which labels would tell most.
"""

from ctxguard.monitor.alarms.actions import AlarmActions, SwitchOutcome
from ctxguard.monitor.alarms.alarm import Alarm, AlarmKind, Severity
from ctxguard.monitor.alarms.board import ActiveAlarm, AlarmBoard, BoardReport
from ctxguard.monitor.alarms.drift import DriftWatch, Reference, Signal, Signals
from ctxguard.monitor.alarms.labelling import JudgedSample, where_labels_tell_most
from ctxguard.monitor.alarms.switching import switch_to_safe
from ctxguard.monitor.alarms.watches import LossWatch, Quantity, loss_watches
from ctxguard.monitor.alarms.webhook import Webhook, WebhookAccounts

__all__ = [
    "ActiveAlarm",
    "Alarm",
    "AlarmActions",
    "AlarmBoard",
    "AlarmKind",
    "BoardReport",
    "DriftWatch",
    "JudgedSample",
    "LossWatch",
    "Quantity",
    "Reference",
    "Severity",
    "Signal",
    "Signals",
    "SwitchOutcome",
    "Webhook",
    "WebhookAccounts",
    "loss_watches",
    "switch_to_safe",
    "where_labels_tell_most",
]
