"""A store in several processes: begun together, killed in the midst of writing, and forked."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest
from storing import OpenStore

from ctxguard.monitor.store import State
from tests.timing import PATIENCE_SECONDS

_STORE = """
import os, signal, sys, threading
from ctxguard.monitor.store import Batch, LabelRow, SampleStore
from tests.stored import written
store = SampleStore.open(sys.argv[1])
def append(worker, *requests):
    for request in requests or [worker] * 30:
        store.append(worker, Batch([written(request)], 1))
"""


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a program that may use ``store`` and ``append``."""
    return subprocess.Popen(
        [sys.executable, "-c", _STORE + textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(processes: Sequence["subprocess.Popen[str]"]) -> list[str]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err
        found.append(out.strip())
    return found


class TestProcesses:
    @pytest.mark.parametrize("any_store_url", ["sqlite", "postgresql", "pooled"], indirect=True)
    def test_tables_are_made_once(self, any_store_url: str, open_store: OpenStore) -> None:
        """And none meets what another has prepared on a connection that they share."""
        program = """
            worker = sys.argv[2]
            for n in range(20):
                request = f"{worker}-{n}"
                append(worker, request)
                store.add_labels([LabelRow(request, "p", 1, None, worker, float(n))], 3)
                assert len(store.labels(store.find([request]))) == 1
                store.states(), store.series(), store.top_grade()
        """
        outcomes([run(program, any_store_url, f"w{n}") for n in range(4)])
        store = open_store(any_store_url)
        assert [store.accounts(worker_id=f"w{n}").stored for n in range(4)] == [20] * 4
        assert store.states()[State.PENDING] == 80

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_store_works_across_a_fork(self, any_store_url: str, open_store: OpenStore) -> None:
        program = """
            append("before")
            busy = threading.Thread(target=append, args=("thread",))
            busy.start()
            children = []
            for n in range(5):
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    append(f"child {n}")
                    sys.exit(0)
                children.append(child)
            append("after")
            busy.join()
            print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        """
        assert outcomes([run(program, any_store_url)]) == ["[0, 0, 0, 0, 0]"]
        store = open_store(any_store_url)
        names = ["after", "before", "thread", *(f"child {n}" for n in range(5))]
        assert [store.accounts(worker_id=name).stored for name in names] == [30] * 8
        assert store.states()[State.PENDING] == 240

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_childs_writes_outlive_parents_close(
        self, any_store_url: str, open_store: OpenStore
    ) -> None:
        program = """
            append("w", "r")
            to_parent, to_child = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                append("w", "r")
                os.write(to_parent[1], b".")
                os.read(to_child[0], 1)
                append("w", "r")
                os._exit(0)
            os.read(to_parent[0], 1)
            store.close()
            os.write(to_child[1], b".")
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        assert outcomes([run(program, any_store_url)]) == ["0"]
        assert open_store(any_store_url).accounts().stored == 3

    def test_types_need_no_database_library(self) -> None:
        program = "import sys\nfrom ctxguard.monitor.store import Batch\nprint(*sys.modules)"
        found = subprocess.check_output([sys.executable, "-c", program], text=True).split()
        assert not {"sqlalchemy", "psycopg"} & {*found}
