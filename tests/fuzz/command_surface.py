"""The command line, with odd files and odd options."""

from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from itertools import count
from pathlib import Path
from random import Random
from unittest import mock

from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.command import invoke
from tests.core.test_profile import PROFILE
from tests.doubles import WordTokenEmbedder
from tests.fuzz.file_surfaces import QUESTIONS, READERS, filled_store
from tests.fuzz.inputs import changed, text
from tests.fuzz.surface import Input, Make, surface

_COMMANDS = (
    "index {corpus.jsonl} --out {new}",
    "index {corpus.jsonl} --out {index} --update",
    "query red --index {index} --profile {profile.json}",
    "query red --index {index} --json",
    "query red --system {system.toml}",
    "evaluate --index {index} --data {data.jsonl} --json",
    "evaluate --run {run.txt} --data {data.jsonl} --system {run.toml}",
    "calibrate --index {index} --data {data.jsonl} --out {new.json}",
    "calibrate --run {run.txt} --data {data.jsonl} --system {run.toml} --out {new.json}",
    "evaluate --index {index} --data {data.jsonl} --candidate all",
    "evaluate --index {index} --data {data.jsonl} --against {comparison.json}",
    "explain r0 --store {store}",
    "explain r0 --store {store} --profile {profile.json} --json",
    "label export --store {store} --out {new.csv}",
    "label import {labels.jsonl} --store {store} --annotator me",
    "label import {labels.csv} --store {store} --annotator me",
    "monitor --store {store} --judge labels --labels {data.jsonl} --once --json",
    "calibrate --store {store} --profile {profile.json} --out {new.json}",
    "golden check {new}",
    "golden freeze {data.jsonl} --out {new}",
    "judge --index {index} --queries {questions.jsonl} --store {store}",
    "golden hard-negatives --index {index} --data {data.jsonl} --out {new.jsonl}",
    "metrics rules",
    "serve --index {index} --port 99999",
    "serve --profile {profile.json} --index {absent}",
)

_CONTENTS = {
    "corpus.jsonl": b"".join(
        b'{"_id": "p%d", "title": "t", "text": "a red fox %d"}\n' % (n, n) for n in range(8)
    ),
    "data.jsonl": b'{"query_id": "q1", "text": "red fox", "relevant": {"p1": 2, "p2": 1}}\n'
    b'{"query_id": "q2", "text": "fox", "relevant": ["p3"], "distractors": ["p4"]}\n',
    "run.txt": b"q1 Q0 p1 1 2.5 tag\nq1 Q0 p2 2 1.5 tag\nq2 Q0 p3 1 1 tag\n",
    "profile.json": PROFILE.to_json().encode(),
    "comparison.json": READERS["comparison"][1],
    "system.toml": b'index = "index"\n[query]\nk = 3\n',
    "run.toml": b'score-kind = "ratio"\n[fingerprint]\nmodel = "m"\n',
    "labels.jsonl": READERS["label file"][1],
    "labels.csv": READERS["label file as CSV"][1],
    "questions.jsonl": QUESTIONS,
}

_OPTIONS = (
    *("--k", "-k", "--depth", "--seed", "--json", "--route", "--split", "--n", "--tenant", "--all"),
    *("--utility", "--held-out", "--fingerprint", "--score-kind", "--policy", "--judge", "--help"),
    *("--profile", "--index", "--data", "--store", "--out", "--report-json", "--odd", "--", "-"),
)


class _CommandsEmbedder(WordTokenEmbedder):
    """In place of the model that commands open."""

    passage_window = None


@surface("command line", is_slow=True)
def _command_line(folder: Path, closing: ExitStack) -> Make:
    # A file that an odd argument names is written here.
    closing.enter_context(chdir(folder))
    embedder = _CommandsEmbedder()
    made = mock.Mock(return_value=embedder)

    @contextmanager
    def without_a_model() -> Iterator[None]:
        names = {"SentenceTransformerEmbedder": made}
        with (
            mock.patch.multiple("ctxguard.retrieval.hybrid.retriever", **names),
            mock.patch.multiple("ctxguard.retrieval.models.embedder", **names),
        ):
            yield

    passages = [Passage(f"p{n}", f"a red fox {n}", "t") for n in range(8)]
    HybridRetriever.build(passages, embedder=embedder).save(folder / "index")
    filled_store(f"sqlite:///{folder / 'samples.db'}")[0].close()
    numbers = count()

    def paths(word: str) -> str:
        """The file that a word names; a new one has a name that no other has."""
        if not word.startswith("{"):
            return word
        name = word[1:-1]
        if name == "store":
            return f"sqlite:///{folder / 'samples.db'}"
        stem, _, suffix = name.partition(".")
        if stem == "new":
            name = f"new{next(numbers)}.{suffix}".rstrip(".")
        return str(folder / name)

    def run(arguments: list[str]) -> None:
        with without_a_model():
            result = invoke(arguments)
        if result.exception is not None:
            raise result.exception
        assert "Traceback" not in result.output
        assert result.exit_code in (0, 1, 2)

    def make(random: Random) -> Input:
        words = random.choice(_COMMANDS).split()
        size = 0
        touched = [word[1:-1] for word in words if word[1:-1] in _CONTENTS]
        for name, content in _CONTENTS.items():
            is_odd = name in touched and random.random() < 0.6
            new = changed(content, random) if is_odd else content
            size += len(new)
            (folder / name).write_bytes(new)
        arguments = [paths(word) for word in words]
        for _ in range(random.choice((0, 0, 0, 0, 1, 2))):
            odd = random.choice(_OPTIONS), random.choice(("0", "-1", "1e999", "x", text(random, 5)))
            arguments[1:1] = odd[: random.randint(1, 2)]
        if random.random() < 0.1:
            del arguments[random.randrange(len(arguments))]
        # Arguments of a process hold no NUL and no lone surrogate that is not a byte.
        arguments = [
            each.replace("\0", "").encode("utf-8", "ignore").decode() for each in arguments
        ]
        return Input(arguments, size + len(repr(arguments)), lambda: run(arguments))

    for name, content in _CONTENTS.items():
        (folder / name).write_bytes(content)
    for words in _COMMANDS:
        run([paths(word) for word in words.split()])
    return make
