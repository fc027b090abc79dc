"""The sample store: what writers, the monitor, people and exports do with it.

Each entry is described where it is defined, grouped by who uses it. Each is one transaction, unless
its docstring says otherwise, and may be called from any thread of any process. Errors and logs
never hold a payload.
"""

from ctxguard.monitor.store import judgments, labelling, retention, samples
from ctxguard.monitor.store.database import Store
from ctxguard.monitor.store.transactions import Transaction, reads, snapshot, writes


class SampleStore(Store):
    """Samples, their judgments, and people's labels of them.

    On a fault of the database every method raises a ``StoreError`` that says how to mend it. Once
    it is mended the store goes on: there is room again, or a damaged file was moved away.
    """

    append = samples.append
    stored_shares = samples.stored_shares
    fold_accounts = samples.fold_accounts
    accounts = samples.accounts

    waiting = samples.waiting
    failed = samples.failed
    n_failed = samples.n_failed
    finish = samples.finish
    counts = samples.counts
    save_again = samples.save_again
    states = samples.states
    oldest_waiting = samples.oldest_waiting
    payloads = samples.payloads

    series = judgments.series
    judged_pages = judgments.judged_pages
    losses = judgments.losses
    first_loss_seconds = judgments.first_loss_seconds
    grades = judgments.grades
    rejected = judgments.rejected
    find = judgments.find
    samples_of = judgments.samples_of
    newest_samples = judgments.newest_samples

    known_requests = reads(labelling.known_requests)
    add_labels = labelling.add_labels
    top_grade = labelling.top_grade
    labels = labelling.labels

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
    draws = judgments.draws

    get_state = reads(Transaction.state)
    set_state = writes(Transaction.set_state)

    snapshot = snapshot
    size_bytes = retention.size_bytes
    clean = retention.clean
