"""The sample store: what writers, monitors, people and exports do with it.

Each entry is described where it is defined, grouped by who uses it. Each is one transaction, unless
its docstring says otherwise, and may be called from any thread of any process. Errors and logs
never hold a payload.
"""

import time
from collections.abc import Callable

from ctxguard.monitor.store import judgments, labelling, retention, samples, shared
from ctxguard.monitor.store.database import Database
from ctxguard.monitor.store.transactions import Store
from ctxguard.monitor.store.types import DEFAULT_LIMITS, Limits


class SampleStore(Store):
    """Samples, their judgments, and people's labels of them; opened by ``open``.

    On a fault of the database every method raises a ``StoreError`` that says how to mend it. Once
    it is mended the store goes on: there is room again, or a damaged file was moved away.
    """

    append = samples.append
    stored_shares = samples.stored_shares
    fold_accounts = samples.fold_accounts
    accounts = samples.accounts

    claim = samples.claim
    finish = samples.finish
    save_again = samples.save_again
    give_back = samples.give_back
    states = samples.states
    oldest_pending_seconds = samples.oldest_pending_seconds
    is_unfinished = samples.is_unfinished
    payloads = samples.payloads

    series = judgments.series
    judged_counts = judgments.judged_counts
    judged_pages = judgments.judged_pages
    losses = judgments.losses
    first_loss_seconds = judgments.first_loss_seconds
    verdicts = judgments.verdicts
    rejected = judgments.rejected
    find = judgments.find
    samples_of = judgments.samples_of
    newest_samples = judgments.newest_samples

    add_labels = labelling.add_labels
    top_grade = labelling.top_grade
    unknown_requests = labelling.unknown_requests
    labels = labelling.labels
    queue_labels = labelling.queue_labels
    label_queue = labelling.label_queue
    add_feedback = labelling.add_feedback
    feedback_counts = labelling.feedback_counts
    feedback = labelling.feedback

    to_pick = labelling.to_pick
    save_pick = labelling.save_pick
    ask_for_labels = labelling.ask_for_labels
    picked = labelling.picked
    picked_samples = labelling.picked_samples

    to_grade = judgments.to_grade
    labelled = judgments.labelled
    blocks = judgments.blocks
    save_graded = judgments.save_graded
    graded = judgments.graded

    lead = shared.lead
    add_counts = shared.add_counts
    get_state = shared.get_state
    set_state = shared.set_state
    update_state = shared.update_state
    check = shared.check

    size_bytes = retention.size_bytes
    clean = retention.clean

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """Open a store, and create its tables where there are none.

        Args:
            url: ``sqlite:///path/samples.db`` for the processes of one host, ``sqlite://`` for
                one in memory, ``postgresql://user@host/database`` for several hosts.
            limits: What ``clean`` keeps.
            clock: Seconds since the epoch.

        Raises:
            ConfigurationError: a URL that cannot be used.
            MissingExtraError: the database's driver is not installed.
            StoreUnavailableError: the folder or the server cannot be reached.
            StoreSchemaError: it is another release's, another program's or not a whole store; it
                is not changed.
            StoreError: another fault of the database.
        """
        store = cls.at(url, limits=limits, clock=clock)
        store.check()
        return store

    @classmethod
    def at(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """Make a store that is opened when it is first used; see ``open``."""
        return cls(Database(url), limits, clock)

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        return self.database.name

    def close(self) -> None:
        """Close its connections; it opens new ones when used again."""
        self.database.close()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
