"""Converts the visible content of an HTML page to Markdown, without menus and footers.

Pure; needs the extra `documents`.
"""

import re
from collections.abc import Callable
from typing import Any

from bs4 import BeautifulSoup, Tag
from markdownify import ATX, MarkdownConverter

from calibration.data.documents.markdown import guarded

_NEVER_SHOWN = [
    *("script", "style", "noscript", "template", "svg", "iframe", "head", "object", "button"),
    *("select", "textarea", "input", "dialog", "datalist", "canvas", "audio", "video", "title"),
]
_ROLES = {
    *("navigation", "banner", "contentinfo", "search", "menu", "menubar", "dialog", "alertdialog"),
}
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|(?:left|top|text-indent)\s*:\s*-\d{3,}"
    r"|font-size\s*:\s*0(?:\.0*)?(?:px|em|rem|pt|%)?\s*(?:;|!|$)",
    re.IGNORECASE,
)
_FADED_STYLE = re.compile(r"opacity\s*:\s*0(?:\.0*)?\s*(?:;|!|$)", re.IGNORECASE)
_HIDDEN_CLASSES = {"sr-only", "visually-hidden", "screen-reader-text", "d-none", "is-hidden"}
_LINES_OF_CODE = {"linenos", "lineno", "gutter", "line-numbers", "headerlink", "anchor-link"}
_SELECTOR = re.compile(r"\s*([.#])([\w-]{1,100})\s*")

_MENU_WORDS = {
    *("nav", "navbar", "navigation", "menu", "sidebar", "breadcrumb", "breadcrumbs", "toc"),
    *("pagination", "sphinxsidebar", "related", "pager"),
}
_FOOTER_WORDS = {"footer", "cookie", "cookies", "skiplink", "colophon"}
_WORD = re.compile(r"[a-z]+")
_SMALL_SHARE = 0.4
"""An element that is named as a menu or footer but makes up most of a page is neither."""
_MAIN_SHARE = 0.3
_OWN = ["main", "article", "h1"]
_BLOCKS = ["table", "pre", "h1", "h2", "h3", "h4", "h5", "h6"]
_TABLE_PARTS = {"tr", "td", "th", "tbody", "thead", "tfoot"}
_SPACES = re.compile(r"[ \t]{80,}|\n{80,}")


class _Writer(MarkdownConverter):
    """Writes Markdown without escapes, image addresses, or links within the page."""

    def convert_img(self, el: Tag, text: str, parent_tags: set[str]) -> str:  # noqa: ARG002
        return " ".join(str(el.get("alt") or "").split())

    def convert_a(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        address = str(el.get("href") or "")
        if not address.startswith(("http://", "https://", "mailto:", "/", ".")) and ":" in address:
            return text
        if address.startswith("#") or not address or "_noformat" in parent_tags:
            return text
        written: str = super().convert_a(el, text, parent_tags)  # type: ignore[misc]
        return written

    def convert_p(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        paragraph: str = super().convert_p(el, guarded(text), parent_tags)  # type: ignore[misc]
        return paragraph

    def convert_td(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        cell: str = super().convert_td(el, text.replace("|", "\\|"), parent_tags)  # type: ignore[misc]
        return cell

    convert_th = convert_td

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:  # noqa: ARG002
        code = el.get_text().strip("\n")
        fence = "`" * (max([2, *map(len, re.findall("`+", code))]) + 1)
        return f"\n\n{fence}{_language(el)}\n{code}\n{fence}\n\n" if code.strip() else ""


def to_markdown(page: str) -> tuple[str, str]:
    """Return the title of a page, and its content as Markdown."""
    # The libraries take quadratic time on a run of spaces.
    soup = BeautifulSoup(_SPACES.sub(lambda run: run[0][:80], page), "lxml")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    _without_hidden(soup)
    content = _content(soup.body or soup)
    return title, written(content)


def written(content: Any) -> str:
    """Write the elements of a page as Markdown; those nested too deeply as text."""
    _without_layout(content)
    writer = _Writer(
        heading_style=ATX,
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
        table_infer_header=True,
    )
    try:
        text: str = writer.convert_soup(content)
    except RecursionError:
        text = content.get_text("\n")
    return re.sub(r"\n{3,}", "\n\n", text.replace("\u00a0", " ").replace("\u00ad", ""))


def _without_layout(content: Any) -> None:
    """Turn tables that hold blocks into plain blocks: they only lay out the page."""
    parts: dict[int, list[Tag]] = {}
    layouts: dict[int, Tag] = {}
    stack: list[tuple[Any, Tag | None]] = [(content, None)]
    while stack:
        tag, table = stack.pop()
        if table is not None:
            if tag.name in _BLOCKS:
                layouts[id(table)] = table
            elif tag.name in _TABLE_PARTS:
                parts.setdefault(id(table), []).append(tag)
        if tag.name == "table":
            table = tag
            if tag.get("role") == "presentation":
                layouts[id(tag)] = tag
        stack += [(child, table) for child in tag.children if isinstance(child, Tag)]
    for key, table in layouts.items():
        for each in [table, *parts.get(key, ())]:
            each.name = "div"


def _language(code: Tag) -> str:
    around = [code, *code.find_all("code", limit=1), *([code.parent] if code.parent else [])]
    for each in around:
        for name in each.get("class") or ():
            kind, _, language = str(name).partition("-")
            if kind in {"language", "lang", "highlight", "brush"} and language.isalnum():
                return language
    return ""


def _without_hidden(soup: BeautifulSoup) -> None:
    unseen = _hidden_by_rules(soup)
    for each in soup(_NEVER_SHOWN):
        each.decompose()

    def is_hidden(tag: Tag) -> bool:
        classes = {str(name) for name in tag.get("class") or ()}
        return (
            tag.has_attr("hidden")
            or bool(classes & (_HIDDEN_CLASSES | _LINES_OF_CODE))
            or _hides(str(tag.get("style") or ""), tag)
            or not unseen.isdisjoint({f".{name}" for name in classes} | {f"#{tag.get('id')}"})
        )

    _remove(soup, is_hidden)


def _hides(style: str, tag: Tag) -> bool:
    if _HIDDEN_STYLE.search(style):
        return True
    # Scripts fade parts of a page in: these move, or have attributes for the script.
    is_moved = "trans" in style or any(name.startswith("data-") for name in tag.attrs)
    return not is_moved and bool(_FADED_STYLE.search(style))


def _hidden_by_rules(soup: BeautifulSoup) -> set[str]:
    """Return the classes and ids that the page's own style sheets hide on every screen."""
    unseen: set[str] = set()
    for sheet in soup("style"):
        first, *others = sheet.get_text().split("/*")
        css = first + "".join([each.partition("*/")[2] for each in others])
        depth = 0
        for rule in css.split("}"):
            selectors, _, body = rule.partition("{")
            # A nested rule applies to print or to some screens only.
            if depth == 0 and "{" not in body and _HIDDEN_STYLE.search(body):
                found = [_SELECTOR.fullmatch(each) for each in selectors.split(",")]
                unseen |= {each[1] + each[2] for each in found if each}
            depth = max(0, depth + rule.count("{") - 1)
    return unseen


def _content(body: Any) -> Any:
    """Return the part of a page that holds its own content."""
    sizes = _sizes(body)
    whole = max(1, sizes[id(body)][0])

    def is_around(tag: Tag) -> bool:
        size, linked = sizes.get(id(tag), (0, 0))
        if tag.name in {"main", "article", "body", "h1"} or tag.get("role") == "main":
            return False
        if tag.name == "nav" or str(tag.get("role") or "") in _ROLES:
            return True
        if tag.name in {"header", "footer", "aside"}:
            inside = tag.find_parent(["article", "main", "section", "blockquote"])
            return inside is None and tag.find(_OWN) is None
        if tag.name not in {"div", "ul", "ol", "section", "table", "p", "form", "a"}:
            return False
        names = " ".join([*map(str, tag.get("class") or ()), str(tag.get("id") or "")])
        words = {*_WORD.findall(names.casefold())}
        named = words & _FOOTER_WORDS or (words & _MENU_WORDS and linked * 2 > size)
        return bool(named) and size <= _SMALL_SHARE * whole and tag.find(_OWN) is None

    _remove(body, is_around)
    mains = body.find_all(lambda tag: tag.name == "main" or tag.get("role") == "main", limit=2)
    if len(mains) == 1 and sizes.get(id(mains[0]), (0, 0))[0] > _MAIN_SHARE * whole:
        return mains[0]
    return body


def _sizes(body: Any) -> dict[int, tuple[int, int]]:
    """Measure the text of each element, and of the links in it."""
    sizes: dict[int, tuple[int, int]] = {}
    stack: list[tuple[Any, bool]] = [(body, False)]
    while stack:
        tag, seen = stack.pop()
        if not seen:
            stack.append((tag, True))
            stack += [(child, False) for child in tag.children if isinstance(child, Tag)]
            continue
        size = linked = 0
        for child in tag.children:
            if isinstance(child, Tag):
                inner = sizes[id(child)]
                size, linked = size + inner[0], linked + inner[1]
            else:
                size += len(str(child).strip())
        sizes[id(tag)] = (size, size if tag.name == "a" else linked)
    return sizes


def _remove(root: Any, unwanted: Callable[[Tag], bool]) -> None:
    """Remove the outermost elements that are unwanted."""
    stack = [each for each in root.children if isinstance(each, Tag)]
    while stack:
        tag = stack.pop()
        if unwanted(tag):
            tag.decompose()
        else:
            stack += [each for each in tag.children if isinstance(each, Tag)]
