"""Gathers the sample store's functions for writers, the monitor, people and exports.

Each entry is described where it is defined, grouped by who uses it. Each is one transaction, unless
its docstring says otherwise, and may be called from any thread of any process. Errors and logs
never hold a payload. Touches the database and the clock.
"""

from ctxguard.monitor.store import judgments, labelling, samples
from ctxguard.monitor.store.database import Store, Transaction, reads, snapshot, writes


class SampleStore(Store):
    """Stores samples, their judgments, and people's labels of them.

    On a fault of the database every method raises a ``StoreError`` that says how to mend it. Once
    it is mended the store goes on: there is room again, or a damaged file was moved away.
    """

    append = samples.append
    fold_accounts = samples.fold_accounts
    accounts = samples.accounts

    waiting = samples.waiting
    states = samples.states
    oldest_waiting = samples.oldest_waiting
    records = samples.records
    rejected = samples.rejected
    find = samples.find
    samples_of = samples.samples_of
    newest_samples = samples.newest_samples

    clean = samples.clean

    series = judgments.series
    finish = judgments.finish
    counts = reads(judgments.counts_of)
    failed = judgments.failed
    n_failed = judgments.n_failed
    save_again = judgments.save_again

    grades = judgments.grades
    judged_pages = judgments.judged_pages
    first_rows = judgments.first_rows
    first_loss_seconds = judgments.first_loss_seconds

    known_requests = reads(labelling.known_requests)
    add_labels = labelling.add_labels
    top_grade = reads(labelling.top_grade_of)
    labels = labelling.labels

    to_pick = labelling.to_pick
    save_pick = labelling.save_pick
    ask_for_labels = labelling.ask_for_labels
    picked = labelling.picked
    picked_samples = labelling.picked_samples

    to_grade = labelling.to_grade
    labelled = labelling.labelled
    save_graded = labelling.save_graded
    graded = labelling.graded
    draws = reads(labelling.draws_of)

    get_state = reads(Transaction.state)
    set_state = writes(Transaction.set_state)

    snapshot = snapshot
