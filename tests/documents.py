"""Small documents of each kind that `ctxguard index` reads, and files of lines."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

Sections = dict[str, str]
"""Texts by heading."""

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
_MAIN = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"


def write_lines(file: Path, *rows: object) -> Path:
    """Write each row on a line: a string as it is, another value as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def rewritten(raw: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """Return an Office file with each part changed, by its name and content."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(raw)) as archive,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for name in archive.namelist():
            made.writestr(name, change(name, archive.read(name)))
    return out.getvalue()


def multiplying() -> bytes:
    """Return XML whose entities multiply to a hundred billion characters."""
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "lol">{entities}]><x>&a11;</x>'
    return bomb.encode()


def markdown(file: Path, sections: Sections) -> None:
    parts = [f"# {heading}\n\n{text}\n" for heading, text in sections.items()]
    file.write_text("\n".join(parts), encoding="utf-8")


def text(file: Path, sections: Sections) -> None:
    file.write_text("\n\n".join(sections.values()), encoding="utf-8")


def html(file: Path, sections: Sections) -> None:
    parts = [f"<h1>{heading}</h1><p>{text}</p>" for heading, text in sections.items()]
    file.write_text(f"<html><body>{''.join(parts)}</body></html>", encoding="utf-8")


def word(file: Path, sections: Sections) -> None:
    def paragraph(words: str, style: str = "") -> str:
        about = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        return f"<w:p>{about}<w:r><w:t>{words}</w:t></w:r></w:p>"

    body = "".join(
        paragraph(heading, "Heading1") + paragraph(words) for heading, words in sections.items()
    )
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "[Content_Types].xml",
            f'<Types xmlns="{_TYPES}"><Default Extension="rels" ContentType='
            '"application/vnd.openxmlformats-package.relationships+xml"/><Override '
            f'PartName="/word/document.xml" ContentType="{_MAIN}"/></Types>',
        )
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{_RELATIONS}"><Relationship Id="r1" Type="{_OFFICE}" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>',
        )


def slides(file: Path, sections: Sections) -> None:
    from pptx import Presentation  # type: ignore[import-not-found]

    deck = Presentation()
    for heading, words in sections.items():
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = heading, words
    deck.save(str(file))


def sheet(file: Path, sections: Sections) -> None:
    from openpyxl import Workbook  # type: ignore[import-not-found]

    book = Workbook()
    book.remove(book.active)
    for heading, words in sections.items():
        page = book.create_sheet(heading[:31])
        page.append(["note"])
        page.append([words])
    book.save(file)


def pdf(file: Path, sections: Sections) -> None:
    lines = [words for pair in sections.items() for words in pair]
    shown = "".join(f"({line}) Tj 0 -20 Td " for line in lines)
    stream = f"BT /F1 12 Tf 40 700 Td {shown}ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 5 0 R/Resources 6 0 R>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream\n",
        "<</Font<</F1 4 0 R>>>>",
    ]
    out, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj{each}endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    out += (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
        f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF"
    )
    file.write_text(out, encoding="latin-1")


WRITERS: dict[str, Callable[[Path, Sections], None]] = {
    ".md": markdown,
    ".txt": text,
    ".html": html,
    ".docx": word,
    ".pptx": slides,
    ".xlsx": sheet,
    ".pdf": pdf,
}
