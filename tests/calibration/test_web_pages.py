"""SitePages as a person reads them: their content, without what is hidden or repeats on a site."""

import pytest

from calibration.data.documents.markdown import read_markdown
from calibration.data.documents.repeats import SitePages

pytest.importorskip("markdownify")

from calibration.data.documents.web_page import to_markdown

CONTENT = "<h1>Kettle</h1><p>" + "Boil it with vinegar once a month. " * 5 + "</p>"


def seen(html: str) -> str:
    return to_markdown(f"<html><body>{html}</body></html>")[1]


@pytest.mark.parametrize(
    "hidden",
    [
        "<p hidden>secret</p>",
        '<p style="display: none">secret</p>',
        '<div style="color:red;visibility:hidden"><b>secret</b></div>',
        '<span style="font-size:0">secret</span>',
        '<p style="position:absolute; left:-9999px">secret</p>',
        '<p class="visually-hidden">secret</p>',
        '<p style="opacity:0">secret</p>',
        "<style>.x, .gone { display:none }</style><p class='big gone'>secret</p>",
        "<style>/* a */ #away { left: -999em; }</style><p id='away'>secret</p>",
        "<script>secret</script><noscript>secret</noscript><template>secret</template>",
        "<!-- secret --><svg><text>secret</text></svg><dialog>secret</dialog>",
    ],
)
def test_hidden_text_is_not_read(hidden: str) -> None:
    text = seen(f"{CONTENT}{hidden}<p>Rinse it.</p>")
    assert "secret" not in text
    assert "Rinse it." in text


@pytest.mark.parametrize(
    "shown",
    [
        "<style>@media print { .a {} .x { display: none } }</style><p class=x>shown</p>",
        "<style>.menu .x { display: none } .a {}</style><p class=x>shown</p>",
        '<div style="opacity:0; transform: translateY(9px)">shown</div>',
        '<div style="opacity:0" data-aos="fade-up">shown</div>',
        "<details><p>shown</p></details>",
    ],
)
def test_what_a_screen_shows_is_read(shown: str) -> None:
    assert "shown" in seen(f"{CONTENT}{shown}")


@pytest.mark.parametrize(
    "around",
    [
        "<nav><a href=/a>Other</a></nav>",
        "<header>Other</header>",
        "<footer>Other</footer>",
        "<aside>Other</aside>",
        "<div role=navigation>Other</div>",
        '<div class="site-menu"><ul><li><a href=/a>Other</a></ul></div>',
        '<ul id="breadcrumbs"><li><a href=/a>Other</a></ul>',
        '<div class="page-footer">Other</div>',
        '<div class="cookie-banner">Other</div>',
    ],
)
def test_menus_and_footers_are_not_content(around: str) -> None:
    text = seen(f"{around}{CONTENT}")
    assert "Other" not in text
    assert "Boil it" in text


@pytest.mark.parametrize(
    "page",
    [
        f"<header>{CONTENT}</header>",
        f"<form>{CONTENT}</form>",
        f'<div class="menu">{CONTENT}</div>',
        f"<article><header>{CONTENT}</header></article>",
        f'<div class="menu"><p>Soup 5 francs</p></div>{CONTENT}',
        f"<main>Short.</main>{CONTENT}",
        f"<table><tr><td>{CONTENT}</td></tr></table>",
    ],
)
def test_content_stays_wherever_it_stands(page: str) -> None:
    text = seen(page)
    assert "Boil it" in text
    assert "# Kettle" in text
    assert "|" not in text


CODE = "def f():\n    return MAX_RETRIES  # ```"


@pytest.mark.parametrize(
    ("html", "markdown"),
    [
        (f"<div>Other</div><main>{'Boil it. ' * 9}</main><div>Other</div>", "Boil it. " * 9),
        (f'<div class="highlight-python"><pre>{CODE}</pre></div>', f"````python\n{CODE}\n````"),
        (
            "<table><tr><th>a|b</th><th>c</th></tr><tr><td>1<br>2</td><td></td></tr></table>",
            "| a\\|b | c |\n| --- | --- |\n| 1 2 |  |",
        ),
        (
            '<p><a href="#a">Below</a> <img src="data:image/png;base64,AA" alt="a kettle"></p>',
            "Below a kettle",
        ),
    ],
    ids=["main part", "code", "table", "picture"],
)
def test_content_is_written_as_markdown(html: str, markdown: str) -> None:
    assert seen(html).strip() == markdown.strip()


@pytest.mark.parametrize(
    "text", ["MAX_RETRIES", "2 * 3 * 4", "a [1] b", "# 12 is no heading", "a\n---", "```", "\\_"]
)
def test_words_are_no_markup(text: str) -> None:
    html = text.replace("\n", "<br>")
    (section,) = read_markdown(seen(f"<p>{html}</p>"), is_source=False)[1]
    assert section == ((), text.replace("\n", "  \n"))


@pytest.mark.parametrize("tag", ["div", "b", "blockquote", "ul><li", "table><tr><td"])
def test_deep_pages_are_read(tag: str) -> None:
    assert "Boil it" in seen(f"<{tag}>" * 3_000 + CONTENT)


def repeated(*pages: str) -> list[str]:
    with SitePages() as site:
        for page in pages:
            site.add("", page)
        return [markdown for _, markdown in site.read()]


MENU, FOOTER = "[Home](/) | [Products](/p) | [Contact](/c)", "© 2024 Acme"
LONG_FOOTER = "Acme sells kettles in Bern since 1911; call 031 555 for any question that you have."


def test_repeated_surroundings_are_left_out() -> None:
    """A paragraph that does is kept once: it may be all that answers a question."""
    pages = [
        f"{MENU}\n\n# Page {n}\n\nOwn text {n}.\n\n{LONG_FOOTER}\n\n{FOOTER}" for n in range(5)
    ]
    found = repeated(*pages)
    assert found[0] == f"# Page 0\n\nOwn text 0.\n\n{LONG_FOOTER}"
    assert found[1:] == [f"# Page {n}\n\nOwn text {n}." for n in range(1, 5)]


@pytest.mark.parametrize(
    ("page", "n"),
    [
        ("# Page {}\n\n## Care\n\nUse vinegar.\n\n## Repair\n\nSend it to the workshop.", 5),
        ("# Page {}\n\nUse vinegar.\n\n| a |\n| --- |\n| {} |", 5),
        ("# Page {}\n\nUse vinegar.\n\nOwn {}.", 5),
        ("# A\n\nAll the same.", 4),
        # Few pages are no site.
        (f"{MENU}\n\n# Page {{}}\n\nOwn.", 2),
    ],
)
def test_sections_that_repeat_stay(page: str, n: int) -> None:
    pages = [page.replace("{}", str(at)) for at in range(n)]
    assert repeated(*pages) == pages
