"""What the redactor finds, what it leaves alone, and that it fails closed and in linear time."""

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._redaction_forms import Half, halves, later
from benchmarks.redaction import LEAST_CAUGHT, MOST_CHANGED, is_left, measure
from ctxguard.errors import CtxguardError, RedactionError
from ctxguard.monitor.redaction import redact, redacted
from ctxguard.monitor.redaction.patterns import is_card
from ctxguard.monitor.redaction.redactor import RULES, apply_rule, has_few_digits
from tests.timing import PATIENCE_SECONDS

REDACTED = {
    "e-mail addresses of any script": [
        ("write to joe.o+x@mail.example.org.", "write to [e-mail]."),
        ("jörg@bücher.example, anna@x.de", "[e-mail], [e-mail]"),
        ("请联系joe@example.com谢谢", "请联系[e-mail]谢谢"),
        ("उपयोगकर्ता@उदाहरण.भारत", "[e-mail]"),
        ("joe＠example．org", "[e-mail]"),
        ("joe@163.com", "[e-mail]"),
    ],
    "phone numbers": [
        (f"call {number}, please", "call [phone], please")
        for number in (
            "+49 (0)30 123456-78",
            "+1 (555) 123-4567",
            "0049 30 1234567",
            "555-123-4567",
            "(555) 123-4567",
            "1-800-555-1234",
            "0171/1234567",
            "01 23 45 67 89",
            "01.23.45.67.89",
            "020 7946 0958",
            "(11) 91234-5678",
            "+４９ ３０ １２３４５６７",
        )
    ],
    "payment cards": [
        ("card 4111 1111 1111 1111 12/27 123", "card [card] 12/27 123"),
        ("3782-822463-10005", "[card]"),
        ("5555555555554444", "[card]"),
        ("３７８２ ８２２４６３ １０００５", "[card]"),
        ("4111\u200b1111\u200b1111\u200b1111", "[card]"),
        ("2019 4111 1111 1111 1111 2020", "2019 [card] 2020"),
    ],
    "bank accounts": [
        ("pay DE89 3704 0044 0532 0130 00 with that", "pay [iban] with that"),
        ("AB12 AT61 1904 3002 3457 3201 this", "AB12 [iban] this"),
        ("GB82WEST12345698765432", "[iban]"),
    ],
    "keys with a tell-tale form": [
        (f"use {secret} now", "use [key] now")
        for secret in (
            "AKIA" + "IOSFODNN7EXAMPLE",
            "ghp_" + "a1B2" * 9,
            "github_pat_" + "a1B2" * 9,
            "glpat-" + "a1B2-" * 5,
            "xoxb-" + "123456789012-abcdef",
            "sk_live_" + "a1B2" * 6,
            "sk-proj-" + "a1B2" * 6,
            "AIza" + "Sy-1" * 9,
            "hf_" + "aBcD" * 9,
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "Zm9vYmFyQmF6MTIzNDU2Nzg5MHF1eDc4OTBhYmNkZWY=",
        )
    ],
    "named secrets, whose names stay": [
        ("DB_PASSWORD=hunter2", "DB_PASSWORD=[key]"),
        ('{"password": "my \\"own\\" secret", "n": 1}', '{"password": "[key]", "n": 1}'),
        ("api_key: abc", "api_key: [key]"),
        ("my password is hunter2", "my password is [key]"),
        ("token: abc123def456", "token: [key]"),
        ("Authorization: Bearer abc.def", "Authorization: [key]"),
        ("bearer abcdefgh12345678", "bearer [key]"),
        ("postgres://joe:p4ss@db/x", "postgres://joe:[key]@db/x"),
    ],
    "secrets in commands, tags, addresses and other languages": [
        ("mongo --username joe --password m0ngoPass", "mongo --username joe --password [key]"),
        ("--abcdefghijkl-mnopqrstuvwx-api-key a1b2", "--abcdefghijkl-mnopqrstuvwx-api-key [key]"),
        ("mysql -u root -pS3cretRoot shop", "mysql -u root -p[key] shop"),
        ("curl -u joe:Adm1nPass https://x.org", "curl -u joe:[key] https://x.org"),
        ("sshpass -p 'two words9' scp a b", "sshpass -p '[key]' scp a b"),
        ("machine x.org login joe password netrc9", "machine x.org login joe password [key]"),
        (
            "machine x.org\n  login joe\n  password netrc9",
            "machine x.org\n  login joe\n  password [key]",
        ),
        ("<password>Winter2024</password>", "<password>[key]</password>"),
        (
            '<wsse:Password Type="Text">Soap9</wsse:Password>',
            '<wsse:Password Type="Text">[key]</wsse:Password>',
        ),
        ('<add key="Password" value="Nuget9" />', '<add key="Password" value="[key]" />'),
        ('os.environ["API_KEY"] = "a1"', 'os.environ["API_KEY"] = "[key]"'),
        ("password: |\n  block-value", "password: |\n  [key]"),
        ("mdp: tournesol", "mdp: [key]"),
        ("parola: Rosso7!", "parola: [key]"),
        ("パスワードはsakura2024です", "パスワードは[key]です"),
        ("ｐａｓｓｗｏｒｄ：ｈｕｎｔｅｒ２", "password：[key]"),
        ("passphrase: walnut orbit candle frost nine", "passphrase: [key]"),
        ("password for the wifi is Blue-Kettle-41, ask", "password for the wifi is [key] ask"),
        ("PIN: 4831", "PIN: [key]"),
        ("your verification code is 481516", "your verification code is [key]"),
        ("https://x.org/?jwt=abc.def1&a=1", "https://x.org/?jwt=[key]&a=1"),
        ("https://x.org/?sid=a68vbl3lecrj", "https://x.org/?sid=[key]"),
        ("https://x.org/hooks/catch/1042/ab1c2d3/", "https://x.org/hooks/[key]"),
        ("use AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN", "use [key]"),
        ("https://0123456789abcdef0123@x.org/1", "https://[key]@x.org/1"),
        ("CONSUL_HTTP_TOKEN=550e8400-e29b-41d4-a716-446655440000", "CONSUL_HTTP_TOKEN=[key]"),
        ('"4111", "1111", "1111", "1111"', '"[card]"'),
        ("from ::ffff:81.2.69.142 port 22", "from [ip] port 22"),
        ("[64:ff9b::81.2.69.142]:443", "[[ip]]:443"),
        ("手机 139 1234 5678", "手机 [phone]"),
        ("?email=joe%40mailbox.org", "?email=[e-mail]"),
    ],
    "the rest": [
        ("\ud800 joe@example.org \udfff", "\ud800 [e-mail] \udfff"),
        ("Tel.: 6123456 or mobile 5551234567", "Tel.: [phone] or mobile [phone]"),
        ("order 4111 1111 1111 1112", "order 4111 1111 1111 1112"),
        ("see -----BEGIN PRIVATE KEY-----\nabc\ndef", "see [key]"),
    ],
    "masks, placeholders, versions, digests, paths, and text without secrets": [
        (text, text)
        for text in (
            *(
                "password: ********",
                "Password: ••••••••",
                "password: <yours>",
                "password: !vault |",
            ),
            *(
                "password=$PASSWORD",
                "api_key=API_KEY",
                'if password == "":',
                "[--password PASSWORD]",
            ),
            *("token = tokens[0]", "auth = BasicAuth(user2, b)", "the --password option", "PIN 12"),
            *("Cloudflare WARP 1.1.1.1 is an app", "see clause 4.2.1.3", "git@github.com:a/b.git"),
            *("sha1: 356a192b7913b04c54574d18c28d46e6395428ab", "docker run -p 8080:80 nginx"),
            "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
            "python@sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
            "trace 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            '"id": "msg_01Aq9w938a90dw8q"',
            "https://docs.example.org/webhooks/about-webhooks",
            "on 2024-01-02T10:00:00+01:00, 01.02.2024 10:30, 01-02-2024 10 20 30, 12/31/2023",
            "version 1.2.3-rc.4, 10.12.2024.555, lodash@4.17.21, pkg@1.0.0-beta.1",
            "ISO 27001:2013, ISO/IEC 8601-1, RFC 2119, ISBN 978-0-306-40615-7",
            "$1,234,567.89, 0.123456789012, 1 000 000, 127.0.0.1, 1700000000000",
            "the years 2019 2020 2021 2022, and 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
            "Smith (2019) 123-456",
            "the secret: be kind; the key: value; a token: a unit of text; password is required",
            "bearer of responsibilities and misunderstandings",
            "550e8400-e29b-41d4-a716-446655440000",
            "/docs/en/Getting-Started-2024/Installation-Guide/Overview",
            "getUserByIdAndOrganisationNameFromDatabase2",
            "",
        )
    ],
}


@pytest.mark.parametrize(("text", "clean"), [each for kind in REDACTED.values() for each in kind])
def test_secrets_go_and_rest_stays(text: str, clean: str) -> None:
    assert redact(text) == clean


@given(st.integers(0, 10**14 - 1), st.integers(0, 9))
def test_exactly_one_check_digit_fits(number: int, shift: int) -> None:
    valid = [digit for digit in range(10) if is_card(f"4{number:014d}{(digit + shift) % 10}")]
    assert len(valid) == 1


def test_tables_are_large_and_unique() -> None:
    tables = (*halves(), later())
    forms = [form for half in tables for form in half.forms if form.kind != "before"]
    assert len({form.line for form in forms}) == len(forms) >= 300
    assert sum(form.by_vendor for form in forms) * 2 >= len(forms)
    ordinary = [line for half in tables for line in half.ordinary]
    assert len(set(ordinary)) == len(ordinary) >= 300
    for form in forms:
        rest = form.line
        for secret in form.secrets:
            rest = rest.replace(secret, "[key]")
        assert not any(is_left(secret, rest) for secret in form.secrets), form.line


@pytest.mark.parametrize("half", [*halves(), later()], ids=["read", "counted", "later"])
def test_every_table_holds_the_bars(half: Half) -> None:
    counts = measure(half)
    assert counts.caught_share >= LEAST_CAUGHT, counts.missed
    assert counts.changed_share <= MOST_CHANGED, counts.changed


@given(st.text(alphabet=st.characters(whitelist_categories=("L", "Zs", "Po"), max_codepoint=0x24F)))
def test_words_stay_unless_secret(text: str) -> None:
    if not any(sign in text for sign in ":=@/"):
        assert redact(text) == text


FRAGMENTS = st.sampled_from(
    [
        *("joe", "@", "x.org", ".", "4111", " ", "1111", "-", "+49", "030", "(0)", "0", "12", "/"),
        *("password", "=", ":", '"', "'", "is", "token", "secret", "Bearer", "Authorization"),
        *("AKIA", "IOSFODNN7EXAMPLE", "eyJhbGciOi", "sk-", "-----BEGIN PRIVATE KEY-----", "\n"),
        *("-----END PRIVATE KEY-----", "DE89", "3704", "0044", "0532", "0130", "00", "tel", "://"),
        *("[key]", "[phone]", "[card]", "[e-mail]", "[iban]", "\u200b", "\ud800", "４", "é", "漢"),
        *("a1B2c3D4e5F6g7H8", "\\", "_", "hunter2", "passwd"),
        *(
            "Cookie: a=b",
            "?key=",
            "&sig=a1",
            "PuTTY-User-Key-File-2:",
            "81.2.",
            "69.142",
            "::1",
            "f:",
        ),
        *("Passwort", "lautet", "пароль", "8 916", "600 123 456", "|", "\t", "must be"),
        *("api", "key", "encryption", "KEY", "İ", "sk_live_", "phone", "whatsapp", "ghp_", "555"),
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=40).map("".join))
def test_quick_search_finds_the_same(text: str) -> None:
    lowered, few_digits = text.lower(), has_few_digits(text)
    for rule in RULES:
        searched = rule.pattern.sub(rule.replace, text)
        assert apply_rule(rule, text, lowered, few_digits=few_digits) == searched


@pytest.mark.parametrize(
    "name",
    [
        *("PASSWORD", "passwd", "passphrase", "api key", "API_KEY", "encryption-key", "secretkey"),
        *("webhook_secret", "connection_string", "session-token", "İ access_key_id"),
    ],
)
def test_name_is_known_in_any_form(name: str) -> None:
    assert redact(f"İ {name}: x1") == f"İ {name}: [key]"
    assert redact(f"{name} = 'x y'") == f"{name} = '[key]'"


@pytest.mark.parametrize("thing", [None, b"joe@example.org", 7])
def test_only_text_can_be_redacted(thing: object) -> None:
    for call in (redact, lambda text: redacted(text, str)):
        with pytest.raises(RedactionError, match=f"not {type(thing).__name__}"):
            call(thing)  # type: ignore[operator]
    assert issubclass(RedactionError, CtxguardError)


def test_raising_redactor_quotes_nothing() -> None:
    """A redactor that raises is an error that does not quote the text."""

    def broken(text: str) -> str:
        raise ValueError(f"cannot read {text}")

    with pytest.raises(RedactionError, match="ValueError") as caught:
        redacted("hunter2", broken)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize("answer", [None, b"clean", 0])
def test_redactor_must_return_text(answer: object) -> None:
    with pytest.raises(RedactionError, match=f"it returned {type(answer).__name__}"):
        redacted("text", lambda text: answer)  # type: ignore[arg-type,return-value]


def _parts(pattern: Iterable[tuple[object, object]]) -> Iterable[object]:
    """The patterns that a parsed pattern is made of, one level down."""
    for _, argument in pattern:
        for part in argument if isinstance(argument, tuple | list) else (argument,):
            if hasattr(part, "data"):
                yield part
            elif isinstance(part, list):  # The branches of an alternative.
                yield from (branch for branch in part if hasattr(branch, "data"))


def _faulty_repeats(pattern: Iterable[tuple[object, object]], inside: int = 1) -> Iterable[str]:
    """Repeats that could make a match slower than linear."""
    parser = re._parser  # type: ignore[attr-defined]
    for operation, argument in pattern:
        times = inside
        if operation in (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT):
            most, body = argument[1], argument[2]
            if most is parser.MAXREPEAT:
                if inside > 1:
                    yield f"a repeat without bound inside another: {body}"
                if operation is not parser.POSSESSIVE_REPEAT:
                    yield f"a repeat without bound that gives back: {body}"
                if body.getwidth()[1] > 2:
                    yield f"a repeat without bound of more than a character: {body}"
            times = inside * min(int(most), 1_000)
            if times > 1_000 and most is not parser.MAXREPEAT:
                yield f"repeats that multiply to {times}: {body}"
        for part in _parts([(operation, argument)]):
            yield from _faulty_repeats(part, times)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern.pattern[:30])
def test_rules_never_backtrack(rule: object) -> None:
    pattern: re.Pattern[str] = rule.pattern  # type: ignore[attr-defined]
    parsed = re._parser.parse(pattern.pattern, pattern.flags)  # type: ignore[attr-defined]
    assert list(_faulty_repeats(parsed)) == []


def test_structural_check_finds_bad_patterns() -> None:
    for bad in ("(?:a+)+b", "a+b", "(?:ab{0,99}){0,99}", "(?:a|b+){3}"):
        assert list(_faulty_repeats(re._parser.parse(bad)))  # type: ignore[attr-defined]


HOSTILE = [
    *("1.", "a:", "f::", "?key=a1", "&sig=", "Cookie: a=", "PuTTY-User-Key-File-2:", "пароль: "),
    *("8 ", "600 ", "4111/", "a\u200b", "密码：", "Private-MAC:"),
    *("a", "1", "1 ", "+1", "@", "a@", "a@b.", "4111 ", "password", "password ", "password="),
    *("://a:", "-----BEGIN PRIVATE KEY-----", "eyJ", "Bearer a", "AB12", "tel ", "(030)", "0"),
    *("A1", "/", "1\u200b", "漢", "\ud800", '"password":"', "token:a1", "sk-", "01.02.20", "-a"),
    *("login -p", "zip -P", "curl a:", "login a password ", "--pass ", "-a-a-", "api-key "),
    *("://hook", "hooks/a1", "password>", 'password" value=', "password for a b c ", "key=a1"),
    *("::", "1.2.3.", "::ffff:1.2.3.", '"1", ', "$a$", "1234567890:AA", "a1B2/", "%40", "git@a:b/"),
    *("code is ", "is a1", "パスワードは", "ｐ", "password: aaa bbb ", "password=a.", "V 1.2.3.4 "),
]


def test_hostile_texts_take_linear_time() -> None:
    # Anything quadratic would take 10^10 steps here, minutes for each part.
    script = (
        "from ctxguard.monitor.redaction import redact\n"
        f"for part in {HOSTILE!a}:\n"
        "    redact('x ' + part * (100_000 // len(part)) + ' y@')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_SECONDS)
