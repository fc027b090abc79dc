"""Analysers: what each language finds, and how an index keeps the one that it was built with."""

import re
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.types import Passage, Route
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.retrieval.analysers import LANGUAGES, analyser_for
from ctxguard.retrieval.analysers.english import ENGLISH, STOP_WORDS, words
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.scripts import unhandled_letters
from ctxguard.retrieval.protocols import Analyser
from tests.doubles import WordHashEmbedder

BM25S = r"bm25s lucene k1=1.5 b=0.75; "


def _texts(table: str) -> dict[str, tuple[str, ...]]:
    """A query and a passage for each line that begins with a name; others go on."""
    lines = re.sub(r"\n +", " ", table).strip().splitlines()
    pairs = (line.split(": ", 1) for line in lines)
    return {name: tuple(texts.split(" | ")) for name, texts in pairs}


# A query in other words' forms for its passage.
INFLECTED = _texts("""
da: Hvilke bøger låner biblioteket ud? | Bibliotekerne udlåner en bog ad gangen.
de: Welche Häuser in der Stadt wurden gebaut? | Das Haus wurde neben anderen Städten errichtet.
es: ¿Qué libros prestan las bibliotecas? | La biblioteca presta un libro cada semana.
fr: Quels avions sont arrivés en retard ? | L'avion de Lyon arrive avec une heure de retard.
it: Quali libri ha comprato la biblioteca? | Le biblioteche comprano il libro dell'anno.
nl: Welke huizen zijn gebouwd? | Aan de gracht bouwt men een huis.
no: Hvilke bøkene låner biblioteket? | Bibliotekene låner ut bøker hver uke.
pt: Que livros emprestam as bibliotecas? | A biblioteca empresta um livro por semana.
ru: Какие книги лежат на столах? | Книга лежала на столе у окна.
sv: Vilka böckerna lånar biblioteket ut? | Biblioteken lånade ut böcker varje vecka.
tr: İSTANBUL kütüphanelerinde hangi kitaplar var? | Bu kitap istanbul kütüphanesinde bulunur.
""")

UNSPACED = _texts("""
Japanese: 東京タワーの高さは? |
    東京タワーは一九五八年に完成した電波塔で、高さは三百三十三メートルである。
Japanese in half-width: ﾃﾞｰﾀﾍﾞｰｽを設定するには | データベースの設定は管理画面で変更できます。
Chinese: 长城有多长? | 万里长城是中国古代的防御工程,总长超过两万公里。
Korean: 도서관에서 빌린 책을 반납하려면? | 도서관의 책은 일주일 안에 반납해야 합니다.
Thai: ห้องสมุดเปิดกี่โมง | ห้องสมุดประชาชนเปิดทำการทุกวันเวลาเก้าโมงเช้า
""")


OTHERS = ("The cat sleeps all day.", "The night train is late.", "Butter costs more again.")


def lexical(passages: tuple[str, ...], analyser: Analyser | str) -> HybridRetriever:
    corpus = [Passage(f"p{n}", text) for n, text in enumerate(passages)]
    retriever = HybridRetriever.build(corpus, embedder=WordHashEmbedder(), analyser=analyser)
    return retriever.on_route(Route.LEXICAL)


def hits(retriever: HybridRetriever, query: str) -> list[str]:
    return list(retriever.retrieve(query).passage_ids)


def test_default_keeps_the_profiles_fingerprint() -> None:
    built = lexical(("text",), "en")
    assert built.analyser is ENGLISH is analyser_for("en")
    assert built.fingerprint()["lexical"] == (
        BM25S + r"\w\w+, lower-case, identifier and camel-case parts, 33 English stop words, "
        "Snowball stems"
    )
    assert len(STOP_WORDS) == 33


@pytest.mark.parametrize("language", INFLECTED)
class TestSnowball:
    def test_inflected_query_finds_its_passage_only(self, language: str) -> None:
        query, passage = INFLECTED[language]
        assert hits(lexical((passage, *OTHERS), language), query) == ["p0"]

    def test_leaves_stop_words_and_joins_forms(self, language: str) -> None:
        query, passage, *_ = INFLECTED[language]

        def shared(split: Callable[[str], list[str]]) -> int:
            return len(set(split(query)) & set(split(passage)))

        analyse = analyser_for(language).analyse
        assert 0 < len(analyse(query)) < len(words(query))
        assert shared(analyse) > shared(words)

    def test_accents_may_be_written_apart(self, language: str) -> None:
        analyser, query = analyser_for(language), INFLECTED[language][0]
        assert analyser.analyse(unicodedata.normalize("NFD", query)) == analyser.analyse(query)

    def test_names_its_rules_and_versions(self, language: str) -> None:
        fingerprint = analyser_for(language).fingerprint
        assert f"stems of {language!r}" in fingerprint
        assert "Snowball 3." in fingerprint
        assert "stop words" in fingerprint

    def test_identifier_is_found_by_its_words(self, language: str) -> None:
        retriever = lexical(("OrderedDict.move_to_end", *INFLECTED[language]), language)
        for query in ("OrderedDict", "dict", "move_to_end", "move"):
            assert hits(retriever, query) == ["p0"]

    def test_threads_do_not_disturb_one_another(self, language: str) -> None:
        analyser = analyser_for(language)
        texts = INFLECTED[language] * 40
        alone = [analyser.analyse(text) for text in texts]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(analyser.analyse, texts)) == alone


class TestUnspaced:
    @pytest.mark.parametrize("language", UNSPACED)
    def test_a_query_finds_its_passage_first(self, language: str) -> None:
        passages = [UNSPACED[language][1], *[passage for _, passage in UNSPACED.values()]]
        assert hits(lexical(tuple(passages), "cjk"), UNSPACED[language][0])[0] == "p0"

    @pytest.mark.parametrize(
        ("text", "terms"),
        [
            ("東京都", ["東京", "京都"]),
            ("人々", ["人々"]),
            ("東", ["東"]),
            ("ﾃﾞｰﾀ", ["デー", "ータ"]),
            ("ＡＢＣ１２３", ["abc123"]),
            ("データ・ベース", ["デー", "ータ", "ベー", "ース"]),
            ("東京のwait_forとHTTPServer", ["wait_for", "wait", "httpserver", "http", "server", "東京", "京の", "と"]),  # noqa: E501
            ("한국어 검색", ["한국", "국어", "검색"]),
            ("ที่นี่", ["ที่นี่"]),
            ("The café of Paris", ["café", "pari"]),
            ("、。!?", []),
        ],
    )  # fmt: skip
    def test_terms(self, text: str, terms: list[str]) -> None:
        assert analyser_for("cjk").analyse(text) == terms


@pytest.mark.parametrize("language", LANGUAGES)
@given(text=st.text())
def test_any_text_is_analysed_reproducibly(language: str, text: str) -> None:
    analyser = analyser_for(language)
    terms = analyser.analyse(text)
    assert all(terms)
    assert analyser.analyse(text) == terms


@pytest.mark.parametrize(
    ("analyser", "message"),
    [
        ("ja", r"'ja'; use one of en, .*cjk: Chinese, Japanese"),
        (str.split, "an object with name, fingerprint, scripts"),
    ],
)
def test_unknown_analyser_lists_the_known(analyser: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lexical(("text",), analyser)


class Letters:
    """An analyser of somebody's own: each letter is a term."""

    name = "letters"
    scripts = None

    def __init__(self, fingerprint: str = "letters 1") -> None:
        self.fingerprint = fingerprint

    def analyse(self, text: str) -> list[str]:
        return [letter for letter in text if letter.isalpha()]


class TestSaved:
    @pytest.mark.parametrize("engine", ["bm25s", "rank-bm25"])
    @pytest.mark.parametrize("language", ["en", "de", "cjk"])
    def test_loaded_index_keeps_its_analyser(
        self, tmp_path: Path, language: str, engine: str
    ) -> None:
        texts = (*INFLECTED["de"], *UNSPACED["Japanese"])
        corpus = [Passage(f"p{n}", text) for n, text in enumerate(texts)]
        embedder = WordHashEmbedder()
        built = HybridRetriever.build(corpus, embedder=embedder, analyser=language, lexical=engine)  # type: ignore[arg-type]
        built.save(tmp_path)
        loaded = HybridRetriever.load(tmp_path, embedder=embedder)
        assert loaded.analyser is analyser_for(language)
        assert (loaded.fingerprint(), loaded.report) == (built.fingerprint(), built.report)
        for query in (INFLECTED["de"][0], UNSPACED["Japanese"][0]):
            assert hits(loaded.on_route(Route.LEXICAL), query) == hits(
                built.on_route(Route.LEXICAL), query
            )

    def test_own_analyser_is_given_again(self, tmp_path: Path) -> None:
        retriever = lexical(("abc", "xyz"), Letters())
        assert hits(retriever, "c") == ["p0"]
        assert retriever.fingerprint()["lexical"] == BM25S + "letters 1"
        retriever.save(tmp_path)
        embedder = WordHashEmbedder()
        with pytest.raises(ConfigurationError, match="'letters'; pass that analyser as `analyser`"):
            HybridRetriever.load(tmp_path, embedder=embedder)
        with pytest.raises(ConfigurationError, match="'letters', not 'de'"):
            HybridRetriever.load(tmp_path, embedder=embedder, analyser="de")
        loaded = HybridRetriever.load(tmp_path, embedder=embedder, analyser=Letters())
        assert hits(loaded.on_route(Route.LEXICAL), "c") == ["p0"]

    def test_changed_analyser_refuses_the_index(self, tmp_path: Path) -> None:
        lexical(("abc", "xyz"), Letters()).save(tmp_path)
        with pytest.raises(IndexFolderError, match="letters 2"):
            HybridRetriever.load(
                tmp_path, embedder=WordHashEmbedder(), analyser=Letters("letters 2")
            )

    @pytest.mark.parametrize(
        ("before", "after", "query"),
        [(Letters(), Letters(), "ß"), ("en", "de", INFLECTED["de"][0])],
    )
    def test_reloading_takes_the_new_index(
        self, tmp_path: Path, before: Any, after: Any, query: str
    ) -> None:
        """With the analyser of somebody's own, or the language that it names."""
        retriever = lexical(("abc", "xyz"), before)
        retriever.save(tmp_path)
        lexical((f"ß {INFLECTED['de'][1]}", "xyz"), after).save(tmp_path)
        assert retriever.reload(tmp_path)
        assert retriever.analyser.name == (after if isinstance(after, str) else "letters")
        assert hits(retriever, query) == ["p0"]


class TestScripts:
    @pytest.mark.parametrize(
        ("texts", "language", "said"),
        [
            *[
                (UNSPACED[each], "en", ["100% of the letters are in ", "--language cjk`"])
                for each in ("Japanese", "Chinese", "Korean", "Thai")
            ],
            (INFLECTED["ru"], "de", ["'de' is not made for (CYRILLIC)", "--language ru"]),
            (("Η γάτα κοιμάται όλη μέρα.",), "en", ["(GREEK)", "give an analyser of your own"]),
        ],
    )
    def test_warning_names_script_and_analyser(
        self, texts: tuple[str, ...], language: str, said: list[str]
    ) -> None:
        report = lexical(texts, language).report
        assert report.unhandled_letters > 0.99
        assert all(each in str(report.script_warning) for each in said)

    @pytest.mark.parametrize("language", [*INFLECTED, *UNSPACED])
    def test_letters_fit_their_own_analysers(self, language: str) -> None:
        texts = {**INFLECTED, **UNSPACED}[language]
        only = "cjk" if language in UNSPACED else "ru" if language == "ru" else None
        for analyser in [only] if only else LANGUAGES:
            assert unhandled_letters(texts, analyser_for(analyser)) == (0.0, None)

    def test_few_foreign_letters_are_only_counted(self) -> None:
        report = lexical(("a formula with π in it " * 10,), "en").report
        assert 0.0 < report.unhandled_letters < 0.1
        report = lexical(("the value of a formula with π in it " + "text " * 100,), "en").report
        assert 0.0 < report.unhandled_letters < 0.01
        assert report.script_warning is None

    def test_nothing_warns_without_letters(self) -> None:
        assert lexical(("1 + 2 = 3",), "en").report.unhandled_letters == 0.0
        assert lexical(UNSPACED["Thai"], Letters()).report.script_warning is None
