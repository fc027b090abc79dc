"""Files of an index that are altered in place while it is searched: no damage ends the process."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever
from tests.doubles import WordTokenEmbedder

SEARCHES = """
    import random, sys
    from pathlib import Path

    from ctxguard import Where
    from ctxguard.core.types import Passage, Route
    from ctxguard.errors import CtxguardError
    from ctxguard.retrieval import HybridRetriever
    from ctxguard.retrieval.index import storage
    from tests.doubles import WordTokenEmbedder

    folder, in_memory = Path(sys.argv[1]), sys.argv[2] == "memory"
    if not in_memory:
        storage.VERIFY_LIMIT_BYTES = 0
    embedder = WordTokenEmbedder()
    retriever = HybridRetriever.load(folder, embedder=embedder, verify=False)
    views = [retriever, retriever.on_route(Route.LEXICAL), retriever.on_route(Route.DENSE)]
    query, where = "word3 word5 word8 word80 word200", Where(colour=["red", "blue"])

    def searches():
        answers = []
        for each in views:
            answers += [lambda each=each: each.retrieve(query, depth=20)]
            answers += [lambda each=each: each.retrieve(query, depth=20, where=where)]
        return answers

    def edits():
        copies = [HybridRetriever(retriever.generation, embedder=embedder) for _ in range(2)]
        return [
            lambda: copies[0].add([Passage("new", "word3 unheard")]),
            lambda: copies[1].delete(retriever.passage_ids[3:9]),
        ]

    def answered(work):
        try:
            ranking = work()
            [passage.text for passage in getattr(ranking, "passages", ())]
        except CtxguardError:
            return False
        return True

    assert all([answered(each) for each in (*searches(), *edits())])

    def damages(content):
        half, draw = len(content) // 2, random.Random(7)
        yield "nothing is left", b""
        yield "half is left", content[:half]
        yield "a page is left", content[:4096]
        yield "a byte is cut", content[:-1]
        yield "a byte is added", content + b"x"
        yield "random bytes", draw.randbytes(len(content))
        yield "random bytes behind the head", content[:128] + draw.randbytes(len(content[128:]))
        yield "ones", b"\\xff" * len(content)
        yield "ones behind the head", content[:128] + b"\\xff" * len(content[128:])
        yield "zeros", bytes(len(content))
        yield "halves swapped", content[half:] + content[:half]
        yield "another file", other[:len(content)]

    def written(file, content):
        with file.open("r+b") as stream:
            stream.write(content)
            stream.truncate()

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    other = files[-1].read_bytes()
    n = refused = 0
    for file in files:
        whole = file.read_bytes()
        for name, content in damages(whole):
            print(file.name, name, flush=True)
            written(file, content)
            tried = (*searches(), *(edits() if "head" in name else ()))
            refused += not all([answered(each) for each in tried])
            written(file, whole)
            n += 1
        assert all([answered(each) for each in searches()]), file
    for file in files:
        file.unlink()
    assert all([answered(each) for each in searches()])
    print("survived", n, refused)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with sentences and a tail, most of whose files are several pages long."""
    passages = [
        Passage(
            f"passage-{n:05}",
            " ".join(f"word{(n * k) % 1213}" for k in range(1, 40)) + ".",
            "",
            {"colour": ("red", "green", "blue")[n % 3]},
        )
        for n in range(900)
    ]
    retriever = HybridRetriever.build(passages[:600], embedder=WordTokenEmbedder())
    retriever.add(passages[600:])
    retriever.delete(["passage-00001"])
    folder = tmp_path_factory.mktemp("damaged") / "index"
    retriever.save(folder)
    return folder


@pytest.mark.skipif(os.name == "nt", reason="a file that is mapped cannot be cut there")
@pytest.mark.parametrize("where", ["mapped", "memory"])
def test_no_damage_to_a_file_in_use_ends_the_process(
    saved: Path, where: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "index")
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SEARCHES), str(folder), where],
        capture_output=True,
        text=True,
        check=False,
    )
    *_, last = child.stdout.splitlines() or [""]
    died = signal.Signals(-child.returncode).name if child.returncode < 0 else ""
    assert child.returncode == 0, f"{died} at {last}: {child.stderr[-2000:]}"
    _, kinds, refused = last.split()
    assert int(kinds) >= 74
    # Read into memory, none of it matters any more.
    assert (int(refused) > 0) is (where == "mapped")
