"""Count which forms of secrets the redactor catches, and how many ordinary lines it changes.

    python -m benchmarks.redaction --json redaction.json --check

A form is a line with one secret in it, which must be gone afterwards; an ordinary line holds none,
and must stay as it is. Both tables are below, made by hand: a change of the rules shows its price.
The bars: at least 90% of the forms caught, at most 3% of the ordinary lines changed. With
``--text`` the lines of files of your own are counted as ordinary besides.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctxguard.redaction import redact

LEAST_CAUGHT = 0.90
MOST_CHANGED = 0.03

_PUTTY = (
    "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nComment: me\nPublic-Lines: 1\nAAAAC3Nz\n"
    "Private-Lines: 1\nMC4CAQ\nPrivate-MAC: 1f2e3d"
)
# Written in two parts, as scanners of sources would otherwise report this file.
_AWS, _GITHUB, _SLACK = (
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ghp_" + "a1B2" * 9,
    "xoxb-" + "1234567890-abcd",
)

FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "card": (
        *[("card {} exp 12/27", number) for number in ("4111111111111111", "4111 1111 1111 1111")],
        *[
            ("Karte {}.", "{0}".join(("4111", "1111", "1111", "1111")).replace("{0}", gap))
            for gap in (
                "-",
                ".",
                "/",
                "_",
                ",",
                "|",
                ":",
                "*",
                "·",
                "  ",
                " - ",
                "\t",
                "\u2011",
                "–",
            )
        ],
        ("amex {}", "3782-822463-10005"),
        ("amex {}", "3782/822463/10005"),
        ("mastercard: {} thanks", "5555_5555_5555_4444"),
        ("{} was declined", "4111\u200b1111\u200b1111\u200b1111"),
    ),
    "phone": (
        *[
            ("call {}, please", number)
            for number in ("+48 600 123 456", "600 123 456", "600-123-456")
        ],
        *[("zadzwoń: {}", number) for number in ("22 123 45 67", "(22) 123 45 67", "12-345-67-89")],
        *[
            ("llama al {} hoy", number)
            for number in ("612 345 678", "612 34 56 78", "91 234 56 78")
        ],
        *[
            ("llama al {} hoy", number)
            for number in ("912 345 678", "+34 612 345 678", "612-345-678")
        ],
        *[
            ("звоните {} сегодня", number)
            for number in (
                *("+7 916 123-45-67", "8 (495) 123-45-67", "8 916 123-45-67", "8-800-555-35-35"),
                *("8 (916) 123 45 67", "(495) 123-45-67", "89161234567"),
            )
        ],
        *[
            ("call {}, please", number)
            for number in (
                *("+49 (0)30 123456-78", "+1 (555) 123-4567", "555-123-4567", "(555) 123-4567"),
                *("020 7946 0958", "0171/1234567", "01 23 45 67 89", "0049 30 1234567"),
            )
        ],
        ("Tel. {}", "6123456"),
    ),
    "password": (
        ("password: {}", "hunter2"),
        ("Passwort: {}", "Sommer2024"),
        ("Kennwort = {}", "geheim99"),
        ("mot de passe : {}", "soleil42"),
        ("Mot de passe: {}", "soleil"),
        ("contraseña: {}", "Verano#1"),
        ("la contraseña es {}", "Verano2024"),
        ("senha: {}", "flor1234"),
        ("hasło: {}", "tajne123"),
        ("пароль: {}", "qwerty12"),
        ("Пароль {}", ": зима2024"),
        ("wachtwoord: {}", "welkom01"),
        ("密码：{}", "abc12345"),
        ("パスワード: {}", "sakura88"),
        ("비밀번호: {}", "gks12345"),
        ("my password is {}", "hunter2"),
        ("das Passwort lautet {}", "Sommer2024"),
        ("DB_PASSWORD={}", "hunter2"),
        ('{{"password": "{}"}}', "my own secret"),
        ("postgres://joe:{}@db/x", "p4ss"),
    ),
    "header or address": (
        ("Cookie: {}", "session=abc123; theme=dark"),
        ("cookie: {}", "sid=s%3Aj1.x9"),
        ("Set-Cookie: {}; Path=/", "JSESSIONID=0A1B2C3D"),
        ("-H 'Cookie: {}'", "auth=abc"),
        ("https://x.org/f?key={}", "d41d8cd98f00b204"),
        ("https://x.org/f?a=1&sig={}&b=2", "Zm9vYmFy1%2Fx%3D"),
        ("https://x.org/cb?code={}", "4/0AX4XfWhabc123"),
        ("GET /x?access_token={} HTTP/1.1", "ya12b34c56"),
        ("https://b.s3.amazonaws.com/o?X-Amz-Signature={}", "9f8e7d6c5b4a"),
        ("https://x.blob.core.windows.net/c?sv=2022&se=2024&sig={}", "abc%2B123%3D"),
        ("Authorization: {}", "Bearer abc.def"),
        ("X-Api-Key: {}", "a1b2c3d4e5"),
    ),
    "key": (
        ("use {} now", _AWS),
        ("use {} now", _AWS[:8] + "\u200b" + _AWS[8:]),
        ("use {} now", "\u200d".join(_AWS)),
        ("use {} now", _GITHUB),
        ("use {} now", _GITHUB[:10] + "\u00ad" + _GITHUB[10:]),
        ("use {} now", _SLACK),
        ("use {} now", _SLACK.replace("-", "-\u2060")),
        ("use {} now", "sk-proj-" + "a1B2" * 6),
        ("use {} now", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln"),
        ("use {} now", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("{}", _PUTTY),
        ("{}", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"),
    ),
    "IP address": (
        *[
            ("blocked {} today", address)
            for address in ("81.2.69.142", "203.0.113.7", "10.20.30.40", "192.168.17.4")
        ],
        ("{} - - [01/Jan/2024:10:00:00 +0000] GET /", "93.184.216.34"),
        ("from [{}]:443", "2001:db8:85a3::8a2e:370:7334"),
        ("ping {}", "2a00:1450:4001:82a:0:0:0:200e"),
        ("ip={};", "81.2.69.142"),
        ("http://{}:8080/x", "81.2.69.142"),
    ),
    "e-mail or account": (
        ("write to {}.", "joe.o+x@mail.example.org"),
        ("请联系{}谢谢", "joe@example.com"),
        ("{}", "joe＠example．org"),
        ("pay {} with that", "DE89 3704 0044 0532 0130 00"),
        ("IBAN {}", "GB82WEST12345698765432"),
    ),
}

ORDINARY = """\
-0.001 0.002 0.003
0.001 0.002 0.003 0.004
x = [0.0012, -0.3456, 1.2345, 6.7890]
1e-05 3.2e-04 0.00120 12.5000
password: must be at least twelve characters long
Password: required
Password: the secret that you chose when you signed up
passwords: see the next page
The password is stored as a hash and never in clear
the password was changed on Monday
Passwort: muss mindestens acht Zeichen haben
contraseña: debe tener ocho caracteres
пароль: должен содержать восемь символов
password = None
password = getpass.getpass()
password: ${DB_PASSWORD}
api_key = os.environ["API_KEY"]
def login(user: str, password: str) -> None:
if password == "":
Cookie: a small biscuit that is eaten with tea
cookie: chocolate chip, 12 pieces
A cookie is a small piece of data.
Press any key: the program goes on
the secret: be kind; the key: value; a token: a unit of text
Open https://example.org/search?q=rain&page=2
https://example.org/docs?key=value
https://example.org/error?code=404
https://shop.example.org/p?sku=123&color=red
GET /items?sort=key&order=asc HTTP/1.1 200
on 2024-01-02T10:00:00+01:00, 01.02.2024 10:30, 01-02-2024 10 20 30, 12/31/2023
2024-05-06 12:34:56,789 INFO started in 1234 ms
[12:34:56] build 1042 finished
version 1.2.3-rc.4, 10.12.2024.555, lodash@4.17.21, pkg@1.0.0-beta.1
Windows version 10.0.19041.1237
Chrome/120.0.6099.109 Safari/537.36
Firmware v4.2.1.7 was released
release 1.2.3.4 mends two faults
see section 3.1.2.4 of the manual
listening on 127.0.0.1:8000
bind 0.0.0.0, mask 255.255.255.0
std::vector<int>::iterator it = v.begin();
a::b::c and dead::beef are names
12:30:45 PM
aspect ratio 16:9, scale 1:25000
ISO 27001:2013, ISO/IEC 8601-1, RFC 2119, ISBN 978-0-306-40615-7
doi:10.1145/3397271.3401075
arXiv:2004.12832v2
$1,234,567.89 and 0.123456789012
1 000 000 people live there
The population was 1,234,567 in 2019 and 1,250,000 in 2020.
GDP grew from 612.3 to 640.8 billion
the years 2019 2020 2021 2022, and 2 3 4 5 6 7 8 9 10 11 12 13 14 15
Smith (2019) 123-456
pp. 123-145, vol. 12, no. 3
Lat 52.2297, Lon 21.0122
52°13'47"N 21°00'44"E
room 404, floor 3, building 12
Order 10025 of 2024-03-01: 3 items, 59.97 EUR
Invoice 2024/03/0017
Part number 12-3456-78
SKU 00-1234-567
Flight LO 3924 at 16:45 from gate 21
Train ICE 1001, coach 23, seat 61
The score was 3-2, then 10-8, then 21-19.
Add 250 g of flour, 3 eggs and 100 ml of milk.
Bake at 180 °C for 25 to 30 minutes.
Dose: 500 mg twice a day, at most 4000 mg
Blood pressure 120/80, pulse 72
HbA1c 6.5%, LDL 130 mg/dL
p < 0.001, n = 1,024, 95% CI 0.12 to 0.34
R² = 0.987, RMSE 0.0123
Table 3: 12 34 56 78 90
100 200 300 400 500
600 610 620 630 640 650
1, 2, 3, 5, 8, 13, 21, 34, 55, 89
0 1 1 2 3 5 8 13 21 34 55 89 144
3.14159265358979
2^64 = 18446744073709551616
1700000000000
550e8400-e29b-41d4-a716-446655440000
commit 9571a79
sha1 abbreviated to 4b825dc
/docs/en/Getting-Started-2024/Installation-Guide/Overview
getUserByIdAndOrganisationNameFromDatabase2
src/main/java/org/example/Application.java:42
File "main.py", line 123, in <module>
for i in range(0, 1000000, 50000):
matrix = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
SELECT id, name FROM users WHERE id IN (1, 2, 3)
chmod 0644 file && ls -la
#ff8800, rgb(255, 136, 0)
U+200D ZERO WIDTH JOINER
می‌خواهم کتاب‌های تازه را ببینم
👩‍🚀 went to space
Co\u00adope\u00adra\u00adtion is a long word
bearer of responsibilities and misunderstandings
The token economy rewards good behaviour
auth: see the chapter on access
He authored 12 papers between 1999 and 2009.
The 1st, 2nd and 3rd of May
Chapter 11, verse 22
World War II ended in 1945.
In 1969 two people walked on the Moon.
Tel Aviv has 460,613 inhabitants
The mobile phase was pumped at 1.5 ml per minute
cell 12 of the table
Fax machines were common in 1990
The cell line was grown for 48 hours
He ran 100 m in 9.58 s
Windows 11 needs 4096 MB of memory
Port 8080 is used by another process
HTTP 404 Not Found
Exit status 137
Temperature fell from -12.5 to -20.1
the card number is on the back of the card
Enter your e-mail address and press OK
The @ sign is read as at
@property
user@host: is the form
Bring your IBAN and your passport
An IPv4 address has four numbers from 0 to 255
a phone number has seven to fifteen digits
Call us from Monday to Friday, 9 to 17
Open 9:00-17:00, closed 24.12.-26.12.
§ 1 Abs. 2 Nr. 3 BGB
Art. 6 (1) lit. f GDPR
ZIP 10115 Berlin, 75001 Paris
1600 Pennsylvania Avenue NW, Washington, DC 20500
ул. Ленина, д. 12, кв. 34
ul. Marszałkowska 12/34, 00-590 Warszawa
C/ Mayor 12, 28013 Madrid
NIP and REGON are numbers of firms
3x + 2y = 12, x - y = 1
f(0) = 1, f(1) = 2, f(2) = 4
A4 is 210 × 297 mm
from 10:15 to 11:45 on 03.04.
100,000 characters
Python 3.11, 3.12 and 3.13
numpy==2.1.3
pip install torch==2.5.1+cpu
""".replace("\\u00ad", "\u00ad").splitlines()


@dataclass(frozen=True, slots=True)
class Counts:
    """What the redactor did.

    Attributes:
        missed: The lines of forms whose secret is left, by kind.
        forms: How many forms there are, by kind.
        changed: Ordinary lines that changed, with what became of them.
        ordinary: How many ordinary lines there are.
    """

    missed: dict[str, list[str]]
    forms: dict[str, int]
    changed: list[tuple[str, str]]
    ordinary: int

    @property
    def caught_share(self) -> float:
        """The share of the forms that was caught."""
        return 1 - sum(map(len, self.missed.values())) / sum(self.forms.values())

    @property
    def changed_share(self) -> float:
        """The share of the ordinary lines that changed."""
        return len(self.changed) / self.ordinary


def measure(more_lines: Sequence[str] = ()) -> Counts:
    """Redact every line of the tables.

    Args:
        more_lines: Ordinary lines besides.
    """
    missed = {
        kind: [
            form.format(secret) for form, secret in forms if secret in redact(form.format(secret))
        ]
        for kind, forms in FORMS.items()
    }
    ordinary = [*ORDINARY, *more_lines]
    changed = [(line, clean) for line in ordinary if (clean := redact(line)) != line]
    return Counts(missed, {kind: len(all_) for kind, all_ in FORMS.items()}, changed, len(ordinary))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, nargs="*", default=(), help="files of ordinary lines")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--check", action="store_true", help="fail if a bar is not held")
    arguments = parser.parse_args()
    lines = [line for file in arguments.text for line in file.read_text("utf-8").splitlines()]
    counts = measure(lines)
    table = Table("kind", "forms", "caught", "missed")
    for kind, missed in counts.missed.items():
        n = counts.forms[kind]
        table.add_row(kind, str(n), f"{1 - len(missed) / n:.0%}", "\n".join(map(repr, missed)))
    console = Console()
    console.print(table)
    console.print(
        f"caught {counts.caught_share:.1%} (bar {LEAST_CAUGHT:.0%}); changed "
        f"{len(counts.changed)} of {counts.ordinary} ordinary lines, "
        f"{counts.changed_share:.1%} (bar {MOST_CHANGED:.0%})"
    )
    for line, clean in counts.changed[:20]:
        console.print(f"  {line!r}\n  became {clean!r}", markup=False)
    if arguments.json:
        result = {
            "caught": counts.caught_share,
            "changed": counts.changed_share,
            "missed": counts.missed,
            "changed_lines": counts.changed,
        }
        arguments.json.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", "utf-8")
    holds = counts.caught_share >= LEAST_CAUGHT and counts.changed_share <= MOST_CHANGED
    return int(arguments.check and not holds)


if __name__ == "__main__":
    sys.exit(main())
