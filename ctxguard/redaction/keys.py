"""Rules for keys, tokens and passwords: by their prefix, their name, or their randomness.

Each rule is linear in the length of the text, as in ``patterns``. Pure: no I/O, no clock, no
logging.
"""

import re

from ctxguard.redaction.patterns import Kind, Rule


def _key(_: re.Match[str]) -> str:
    return Kind.KEY.placeholder


def _named_key(match: re.Match[str]) -> str:
    return match["name"] + Kind.KEY.placeholder


_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    # Up to the end of the text where the end mark is missing.
    r"(?:(?!-----END )[\s\S])*+(?:-----END [A-Z0-9 ]{0,60}-----)?"
)
_PUTTY_KEY = re.compile(
    r"PuTTY-User-Key-File-\d{1,2}:(?:(?!Private-MAC:)[\s\S])*+"
    r"(?:Private-MAC:\s{0,4}[0-9A-Fa-f]*+)?"
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"A(?:KIA|SIA|GPA|IDA|ROA|NPA|NVA|IPA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|gh[pousr]_[A-Za-z0-9]{20,}+|github_pat_[A-Za-z0-9_]{20,}+"
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|imt|oas|soat|agent)-[A-Za-z0-9_\-]{20,}+"
    r"|xox[a-z]-[A-Za-z0-9\-]{10,}+|xapp-[A-Za-z0-9\-]{10,}+"
    r"|hooks\.slack\.com/services/[A-Za-z0-9/]{20,}+"
    r"|[prs]k_(?:live|test)_[A-Za-z0-9]{10,}+|whsec_[A-Za-z0-9]{10,}+"
    r"|sk-(?=[A-Za-z_\-]{0,40}[0-9])[A-Za-z0-9_\-]{20,}+"
    r"|AIza[A-Za-z0-9_\-]{30,}+|ya29\.[A-Za-z0-9_\-]{20,}+|GOCSPX-[A-Za-z0-9_\-]{20,}+"
    r"|hf_[A-Za-z0-9]{30,}+|npm_[A-Za-z0-9]{30,}+|pypi-[A-Za-z0-9_\-]{30,}+"
    r"|dop_v1_[a-f0-9]{30,}+|SG\.[A-Za-z0-9_\-]{16,}+[A-Za-z0-9_\-.]*+"
    # A JSON web token: {" in base 64, then the other parts.
    r"|eyJ[A-Za-z0-9_\-]{8,}+[A-Za-z0-9_\-.=]*+"
    r")"
)
_TOKEN_HINTS = (
    *("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glft-", "glimt-", "gloas-", "glsoat-"),
    *("glagent-",),
    *("akia", "asia", "agpa", "aida", "aroa", "anpa", "anva", "aipa", "ghp_", "gho_", "ghu_"),
    *("ghs_", "ghr_", "github_pat_", "xox", "xapp-", "hooks.slack", "k_live_", "k_test_"),
    *("whsec_", "sk-", "aiza", "ya29.", "gocspx-", "hf_", "npm_", "pypi-", "dop_v1_", "sg.", "eyj"),
)
_URL_PASSWORD = re.compile(r"(?P<name>://[^\s/:@]*+:)[^\s/@]++(?=@)")

_ASSIGN = r"\\?[\"'`]?\s{0,4}(?::=|=>|={1,2}|[:：＝])\s{0,4}"
_VALUE = r"(?:(?<=\")(?:[^\"\\\n]|\\.)++|(?<=')[^'\n]++|(?<=`)[^`\n]++|(?<![\"'`])[^\s\"'`]\S*+)"
# Ordinary prose after the word, or a program that takes the value from elsewhere.
_NO_VALUE = (
    r"(?!(?:must|should|shall|may|can|cannot|is|are|was|has|have|will|not|the|an?|use|enter|choose|your"
    r"|required|optional|minimum|at|see|for|if|muss|darf|soll|doit|debe|deve|musi|должен"
    r"|none|null|nil|true|false|undefined|str|string|bytes)(?![\w\-!@#$%^&*])"
    r"|(?:os|process|getpass|self|settings|config|secrets|keyring)\.|\$\{|\{\{|<\w|input\(|[\"'`]{2})"
)
_PASSWORDS = (
    r"pass(?:word|wd|phrase|code)|pwd|passwor[td]|kennwort|mot de passe|contraseña|contrasena|senha"
    r"|hasło|haslo|пароль|wachtwoord|lösenord|密码|密碼|パスワード|비밀번호"
)
_NAMED = re.compile(
    rf"(?i)(?P<name>(?:{_PASSWORDS}|api[_\- ]?key|apikey"
    r"|(?:access|secret|private|signing|encryption|account)[_\-]?key(?:[_\-]id)?"
    r"|(?:client|shared|app|aws|webhook)[_\-]?secret|connection[_\-]?string"
    r"|(?:auth|access|refresh|bearer|session|id|api|csrf|bot)[_\-]?token)"
    rf"{_ASSIGN}{_NO_VALUE}\\?[\"'`]?){_VALUE}"
)
_PASSWORD_HINTS = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "passwort", "kennwort"),
    *("mot de passe", "contraseña", "contrasena", "senha", "hasło", "haslo", "пароль"),
    *("wachtwoord", "lösenord", "密码", "密碼", "パスワード", "비밀번호"),
)
_NAMED_HINTS = (*_PASSWORD_HINTS, "key", "secret", "string", "token")
_LONGEST_BEFORE_HINT = len("encryption_")
# Words of ordinary prose: only a value assigned as in code, or one that looks like a key, counts.
_NAMED_LOOSELY = re.compile(
    r"(?i)(?P<name>(?<![^\W\d_])(?:secret|token|credentials?|auth|pwd|pass)[\"'`]?"
    r"(?:=|\s{0,4}(?:=|:=|:)\s{0,4}(?=[\"'`]?[^\s\d]{0,64}\d\S{5}))[\"'`]?)"
    rf"{_VALUE}"
)
_SPOKEN = re.compile(
    rf"(?i)(?P<name>(?:{_PASSWORDS})\s{{1,4}}(?:is|was|ist|war|lautet|est|es|é|jest|[-–—])\s{{1,4}}"
    r"[\"'`]?)(?=\S{6})(?=[^\s\d]{0,64}\d)(?=[^\sa-z]{0,64}[a-z])\S++"
)
# A cookie's header, which a recipe's heading is not: it has names with values.
_COOKIE = re.compile(
    r"(?i)(?P<name>(?<![^\W\d_])(?:set-)?cookie[\"']?\s{0,4}:\s{0,4}[\"']?)"
    r"(?=[\w.\-]{1,64}=)[^\r\n\"']++"
)
_PARAMETER = re.compile(
    r"(?i)(?P<name>[?&;](?:[\w\-]{0,24}(?:token|signature|secret|credential|api_?key)"
    r"|key|sig|code|auth|password|pwd)=)(?=[^\s&#]{0,64}\d)(?=\d{0,64}[^\s&#\d])[^\s&#\"'<>]{6,}+"
)
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?:(?:basic|bearer|digest|token|apikey|negotiate|aws4-hmac-sha256)\s{1,4})?[^\s\"']++"
)
_BEARER = re.compile(
    r"(?i)(?P<name>(?<![^\W\d_])bearer\s{1,4})(?=[^\s\d]{0,200}\d)[A-Za-z0-9._~+/=\-]{16,}+"
)

_RUN = re.compile(r"(?<![A-Za-z0-9+/_\-])[A-Za-z0-9+/_\-]{32,}+={0,2}")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_CHANGE = re.compile(r"(?<=[a-z])[A-Z0-9]|(?<=[A-Z])[0-9]|(?<=[0-9])[A-Za-z]")
_DIGIT = re.compile(r"[0-9]")
_LEAST_CHANGES = 0.25
"""Of a random run in base 64, 42% of the characters are of another class (capital, small, digit)
than the one before, not counting small ones after capitals; in base 16, 47%; of words joined in
one name or path, under 20%."""


def _random_run(match: re.Match[str]) -> str:
    run = match[0]
    changes = sum(1 for _ in _CHANGE.finditer(run))
    if (
        changes < _LEAST_CHANGES * len(run)
        or _DIGIT.search(run) is None
        or _UUID.fullmatch(run) is not None
    ):
        return run
    return Kind.KEY.placeholder


KEY_RULES = (
    Rule(Kind.KEY, _PRIVATE_KEY, _key, ("private key",)),
    Rule(Kind.KEY, _PUTTY_KEY, _key, ("putty-user-key-file-",), reach=0),
    Rule(Kind.KEY, _COOKIE, _named_key, ("cookie",), reach=len("set-")),
    Rule(Kind.KEY, _PARAMETER, _named_key, ("?", "&", ";"), reach=0),
    Rule(Kind.KEY, _AUTHORIZATION, _named_key, ("authorization",), reach=0),
    Rule(Kind.KEY, _NAMED, _named_key, _NAMED_HINTS, reach=_LONGEST_BEFORE_HINT),
    Rule(
        Kind.KEY,
        _NAMED_LOOSELY,
        _named_key,
        ("secret", "token", "credential", "auth", "pass", "pwd"),
        reach=0,
    ),
    Rule(Kind.KEY, _SPOKEN, _named_key, _PASSWORD_HINTS, reach=0),
    Rule(Kind.KEY, _BEARER, _named_key, ("bearer",), reach=0),
    Rule(Kind.KEY, _URL_PASSWORD, _named_key, ("://",), reach=0),
    Rule(Kind.KEY, _TOKEN, _key, _TOKEN_HINTS, reach=1),
    Rule(Kind.KEY, _RUN, _random_run),
)
