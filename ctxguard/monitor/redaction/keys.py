"""Rules that find keys, tokens and passwords by their prefix, name or randomness.

Each rule is linear in the length of the text, as in ``patterns``. Pure: no I/O, no clock, no
logging.
"""

import re

from ctxguard.monitor.redaction.patterns import Kind, Rule

_PLACEHOLDER = Kind.KEY.placeholder


def _key(_: re.Match[str]) -> str:
    return _PLACEHOLDER


def _named_key(match: re.Match[str]) -> str:
    return match["name"] + _PLACEHOLDER


_CHANGE = re.compile(r"(?<=[a-z])[A-Z0-9]|(?<=[A-Z])[0-9]|(?<=[0-9])[A-Za-z]")
_DIGIT = re.compile(r"[0-9]")


def _changes(run: str) -> int:
    """Count changes of class (capital, small, digit) from one character to the next.

    A small letter after a capital does not count. In a random run of base 64 it is 42% of the
    characters; in base 16, 47%; in words joined to one name or path, under 20%.
    """
    return sum(1 for _ in _CHANGE.finditer(run))


_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    # Up to the end of the text where the end mark is missing.
    r"(?:(?!-----END )[\s\S])*+(?:-----END [A-Z0-9 ]{0,60}-----)?"
)
_PUTTY_KEY = re.compile(
    r"PuTTY-User-Key-File-\d{1,2}:(?:(?!Private-MAC:)[\s\S])*+"
    r"(?:Private-MAC:\s{0,4}[0-9A-Fa-f]*+)?"
)

_PREFIXES = (
    *("AGE-SECRET-KEY-1", "AIza", "APP_USR-", "GOCSPX-", "LTAI", "SG.", "ak-", "api_org_"),
    *("dop_v1_", "dp.pt.", "dp.st.", "dt0c01.", "eyJ", "github_pat_", "gho_", "ghp_", "ghr_"),
    *("ghs_", "ghu_", "glagent-", "glcbt-", "gldt-", "glffct-", "glft-", "glimt-", "gloas-"),
    *("glpat-", "glptt-", "glrt-", "glsoat-", "hf_", "npm_", "ntn_", "oauth:", "pypi-", "sk-"),
    *("sq0atp-", "sq0csp-", "whsec_", "xapp-", "xoxa-", "xoxb-", "xoxc-", "xoxd-", "xoxe-"),
    *("xoxe.", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "ya29."),
)
_MODES = ("_live_", "_test_")
_PREFIXED = re.compile(
    rf"(?<![A-Za-z0-9_])(?:{'|'.join(map(re.escape, _PREFIXES))}"
    rf"|[a-z]{{2,10}}(?:{'|'.join(_MODES)}))(?P<rest>[A-Za-z0-9_\-.=+/:]{{10,}}+)"
)
_LEAST_SIGNS = 4


def _prefixed(match: re.Match[str]) -> str:
    """Keep words after a prefix, as in ``sk-learn-contributors``."""
    signs = _changes(match["rest"]) + len(_DIGIT.findall(match["rest"]))
    return _PLACEHOLDER if signs >= _LEAST_SIGNS else match[0]


_HEX_ID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_SHAPED = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"A(?:KIA|SIA|GPA|IDA|ROA|NPA|NVA|IPA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    rf"|amzn\.mws\.{_HEX_ID}|access-(?:sandbox|development|production)-{_HEX_ID}"
    # A vault's service account, a messenger's bot, a network's app, a broker's key.
    rf"|0\.{_HEX_ID}\.[A-Za-z0-9]{{20,}}+[A-Za-z0-9:+/=]*+"
    r"|(?:bot)?\d{8,10}:AA[A-Za-z0-9_\-]{30,}+|\d{15,16}\|[A-Za-z0-9_\-]{27,}+"
    r"|[A-Za-z0-9_\-]{6}\.[A-Za-z0-9_\-]{6}:(?=[A-Za-z_\-]{0,20}\d)[A-Za-z0-9_\-]{40,}+"
    r"|access_token\$[a-z]{6,12}\$[a-z0-9]{16}\$[a-f0-9]{32}|[12]/\d{16}:[0-9a-f]{32}"
    # A password's hash, as of crypt(3).
    r"|\$[a-z0-9]{1,8}\$[A-Za-z0-9./$=,+]{20,}+"
    r")"
)
_HOOK = re.compile(
    r"(?i)(?P<name>://[^\s\"'<>]{0,120}?hooks?[\w.\-]{0,40}/)(?P<rest>[^\s\"'<>]{6,}+)"
)


def _hook(match: re.Match[str]) -> str:
    """Keep an address made only of words, such as one in a manual."""
    return _named_key(match) if _changes(match["rest"]) >= _LEAST_SIGNS - 2 else match[0]


_URL_PASSWORD = re.compile(
    r"(?P<name>://(?:[^\s/:@]*+:|(?=[^\s/:@]{16})(?=[^\s\d/:@]{0,64}\d)))[^\s/@]++(?=@)"
)

_ASSIGN = (
    r"(?:\\?[\"'`]?\]?\s{0,4}(?::=|=>|={1,2}+|[:：＝])\s{0,4}(?:[|>]-?\n\s{1,12})?"
    # A tag's text, or another attribute.
    r"|(?:\s[^<>\n]{0,120})?>(?=[^<\n]{1,400}</)|[\"'][^<>\n]{0,60}"
    r"(?:\svalue=|>(?=[^<\d\n]{0,64}\d[^<\n]{0,400}</)))"
)
# Ordinary prose after the word, a mask, or a program that takes the value from elsewhere.
_WORDS = (
    r"(?:must|should|shall|may|can|cannot|is|are|was|has|have|will|not|the|an?|use|enter|choose|your"
    r"|and|or|of|to|in|on|from|with|that|when|which|as|by|it|if|you|we|they|option|flag|argument"
    r"|required|optional|minimum|at|see|for|muss|darf|soll|doit|debe|deve|musi|должен|yes|no"
    r"|none|null|nil|true|false|undefined|str|string|bytes)(?![\w\-!@#$%^&*])"
)
_NO_VALUE = (
    rf"(?!{_WORDS}|(?:os|process|getpass|self|settings|config|secrets|keyring)\.|[\"'`]{{2}}"
    r"|[\"'`]?(?:<\w|[*•●.x]{3,64}(?!\w)|[$%]?[{(]|[$%][a-z_]{2,40}%?(?![^\s,;\"'`)}]))"
    r"|[|>]-?\n|[\[!][a-z ]{2,20}(?:\]|(?!\S))|[a-z_][a-z_.]{0,64}[(\[]"
    r"|(?-i:[A-Z_]{0,40}(?:KEY|PASSWORD|PASS|TOKEN|SECRET|TEXT|STRING|VALUE)(?!\w)))"
)
# Words that end a line, and make no sentence.
_PHRASE = (
    rf"(?:(?!{_WORDS})[^\W_]{{3,12}} ){{2,23}}(?!{_WORDS})[^\W_]{{3,12}}"
    r"(?=[.;,!]?\s{0,4}(?:\n|\Z))"
)
_VALUE = (
    r"(?:(?<=\")(?:[^\"\\\n]|\\.)++|(?<=')[^'\n]++|(?<=`)[^`\n]++|(?<=[^=]>)[^<\n]++"
    rf"|(?<![\"'`])(?:{_PHRASE}|[^\s\"'`]\S*+))"
)
_PASSWORD_NAMES = (
    *("password", "passwd", "passphrase", "passcode", "passwort", "passord", "pwd", "psk"),
    *("mdp", "kennwort", "zugangscode", "mot de passe", "contraseña", "contrasena"),
    *("clave de acceso", "senha", "palavra-passe", "palavra passe", "parola d'ordine"),
    *("parolă", "hasło", "haslo", "heslo", "jelszó", "jelszo", "şifre", "sifre", "пароль"),
    *("парола", "wachtwoord", "lösenord", "adgangskode", "salasana", "κωδικός", "סיסמה"),
    *(
        "كلمة المرور",
        "पासवर्ड",
        "mật khẩu",
        "密码",
        "密碼",
        "口令",
        "パスワード",
        "비밀번호",
        "lozinka",
    ),
    *("geslo", "slaptažodis", "parool", "kata sandi", "رمز عبور", "كلمة السر", "รหัสผ่าน"),
)
_PASSWORDS = "|".join(map(re.escape, _PASSWORD_NAMES))
_FOR = r"(?: (?:for|of|to|für|pour|para|per|de|do|от|для)(?: [^\s:=]{1,24}){1,3})?"
_NAMED = re.compile(
    rf"(?i)(?P<name>(?:(?:{_PASSWORDS}){_FOR}|(?:seed|recovery)[_ \-]?phrase|mnemonic"
    r"|api[_\- ]?key"
    r"|(?:access|secret|private|signing|encryption|account|auth)[_\-]?key(?:[_\-](?:id|base))?"
    r"|(?:client|shared|app|aws|webhook|jwt)[_\-]?secret|connection[_\-]?string"
    r"|(?:auth|access|refresh|bearer|session|id|api|csrf|bot|server)[_\-]?token)"
    rf"{_ASSIGN}{_NO_VALUE}\\?[\"'`]?){_VALUE}"
)
_NAMED_HINTS = (*_PASSWORD_NAMES, "phrase", "mnemonic", "key", "secret", "string", "token")
_LONGEST_BEFORE_HINT = len("encryption_")
# At least six characters, a digit and a letter among them.
_STRONG = r"(?=\S{6})(?=[^\s\d]{0,64}\d)(?=\S{0,64}?[^\W\d_])"
# Words of ordinary prose: only a value assigned as in code, or one that looks like a key, counts.
_NAMED_LOOSELY = re.compile(
    r"(?i)(?P<name>(?:(?<![^\W\d_])"
    r"(?:secret|token|cred(?:ential)?s?|auth|pw|pass|parola|clave|login)"
    rf"[\"'`]?(?:=|\s{{0,4}}(?:=|:=|:)\s{{0,4}}(?=[\"'`]?{_STRONG})"
    r"|>(?=[^<\d\n]{0,64}\d[^<\n]{0,400}</))"
    # An id, which by itself is not a secret.
    r"|(?:key|token|secret|session|pat)[\"'`]?\s{0,4}[:=]\s{0,4}"
    r"(?=[\"'`]?[\w\-+/]{16})(?=[^\s\d]{0,64}\d)"
    rf"){_NO_VALUE}[\"'`]?){_VALUE}"
)
_IS = r"(?:is|was|ist|war|lautet|est|es|é|è|e|jest|to|это|este|är|er|on|là|je|είναι|[-–—])"
_SPOKEN = re.compile(
    rf"(?i)(?P<name>(?:{_PASSWORDS}|parola)(?:"
    rf"{_FOR}\s{{1,4}}(?:{_IS}\s{{1,4}})?[\"'`]?"
    r"|[はがは是為为은는이]\s{0,2}(?=[!-~]{6}))"
    rf"|(?<![^\W_])(?:pw|pass|clave|key|token|secret)\s{{1,4}}{_IS}\s{{1,4}}"
    rf"){_STRONG}(?:(?<=[はが是為为은는이])[!-~]++|\S++)"
)
_OPTION = re.compile(
    r"(?i)(?P<name>(?<![\w\-])--?(?:[a-z]{1,12}-?){0,2}"
    r"(?:pass(?:word|wd|phrase)?|pwd|token|secret|api-?key)(?:in|out)?[ ](?:pass:)?"
    rf"(?![\-|\])]){_NO_VALUE}[\"'`]?)(?=\S{{4}}){_VALUE}"
)
# Programs that take a password by a letter, .netrc, a database's and a router's commands.
_COMMAND = re.compile(
    r"(?i)(?P<name>(?:(?:sshpass|login|upload)\b[^\n|;]{0,120}?\s-p[ =]?"
    r"|(?:mysql\w{0,8}|mariadb|7za?|zip)\b[^\n|;]{0,120}?\s-(?:(?-i:P)[ ]?|p)(?=\S)"
    r"|redis-cli\b[^\n|;]{0,120}?\s-a[ ]|ldap\w{2,10}\b[^\n|;]{0,120}?\s-w[ ]"
    r"|openssl\b[^\n|;]{0,120}?\s-k[ ]"
    r"|curl\b[^\n|;]{0,120}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']{1,64}:"
    r"|net use [^\n]{0,120}?/user:\S{1,64}\s"
    r"|login\s{1,4}\S{1,64}\s{1,12}password\s{1,4}"
    r"|(?:identified by|with (?:encrypted )?password)\s{1,4}(?=[\"'])"
    r"|snmp-server community\s|securestring\s(?=[\"'])"
    r"|(?:enable|username\s[^\n]{1,60}?) (?:secret|password)(?:\s\d)?\s)"
    rf"{_NO_VALUE}(?!\d{{1,5}}(?![^\s:])|-)[\"']?)"
    rf"(?:(?<=:)[^'\"\s](?:[^'\"\n]*+(?=')|\S*+)|{_VALUE})"
)
_PERSONS = ("pesel", "cpf", "bsn", "passport")
_SAYS = r"(?: (?:code|number))?(?:\s{0,2}[:=#]\s{0,2}|\s(?:is|was|ist|est|es)\s|\s)"
_CODE = re.compile(
    rf"(?i)(?P<name>(?<![^\W_])(?:cv[cv]2?{_SAYS}(?=\d{{3,4}}(?!\d))|(?:pin|otp|ssn|social security"
    rf"|(?:one-time|verification|security|recovery|confirmation|backup) (?:code|pin)){_SAYS}"
    r"(?=\d{4}|\d{3}[ \-]\d{2,3}|[a-z\d]{3,8}-)"
    rf"|(?:{'|'.join(_PERSONS)})(?: no\.?)?{_SAYS}(?=[a-z\d]{{7,14}}(?!\w))))"
    r"(?:\d{3}-\d\d-\d{4}|\d{3}[ \-]?\d{0,8}"
    r"|(?=[a-z\-]{0,40}\d)[a-z\d]{3,14}(?:-[a-z\d]{3,8}){0,7})(?![\w.])"
)
# A cookie's header, which a recipe's heading is not: it has names with values.
_COOKIE = re.compile(
    r"(?i)(?P<name>(?<![^\W\d_])(?:set-)?cookie[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?=[\w.\-]{1,64}=)[^\r\n\"']++"
)
_PARAMETER = re.compile(
    r"(?i)(?P<name>[?&;#](?:[\w\-]{0,24}(?:token|signature|secret|credential|api_?key|session_?id"
    r"|password|passwd)|key|sig|code|auth|pwd|jwt|sid|otp|session|ticket|hash|hmac)=)(?=[^\s&#]{0,64}\d)[^\s&#\"'<>]{6,}+"
)
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?:(?:basic|bearer|digest|token|apikey|negotiate)\s{1,4}"
    r"|[a-z][\w\-]{1,24}\s{1,4}(?=[^\s\d]{0,64}\d|\S{16}))?[^\s\"']++"
)
_BEARER = re.compile(
    r"(?i)(?P<name>(?<![^\W\d_])bearer\s{1,4})(?=[^\s\d]{0,200}\d)[A-Za-z0-9._~+/=\-]{16,}+"
)

# With what dots and the like join to it.
_RUN = re.compile(
    r"(?<![A-Za-z0-9+/_\-])(?:[A-Za-z0-9_\-]{1,40}+[.~!:$|]){0,3}+"
    r"(?P<run>[A-Za-z0-9+/_\-]{16,}+)={0,2}"
)
_PIECE = re.compile(r"[A-Za-z0-9]{16,}")
_SHA = re.compile(r"sha\d{3}-")
# A UUID, or hexadecimal digits of which each group has a decimal one.
_ID = re.compile(rf"{_HEX_ID}|(?:(?=[a-f]{{0,62}}\d)[0-9a-f]{{1,63}}+(?:-|\Z))++")
# A digest that says so, or an id but of a session or a key.
_CALLED = re.compile(
    r"(?i)(?:sha-?\d{1,3}(?:sum)?:\s?"
    r"|(?<!session[_\-])(?<!key[_\-])(?<![^\W_])id[\"']?\s?[:=]\s?[\"']?)\Z"
)
_LONGEST_CALL = 20


def _is_random(run: str) -> bool:
    if len(run) >= 32 and _changes(run) >= 0.25 * len(run):
        return True
    return any(
        _changes(piece) >= (0.25 if len(piece) >= 24 else 0.3) * len(piece)
        for piece in _PIECE.findall(run)
    )


def _random_run(match: re.Match[str]) -> str:
    """Replace a run that looks random, except a UUID, a digest of up to 63 digits, or a declared
    id."""
    run, start = match["run"], match.start("run")
    if (
        _DIGIT.search(run) is None
        or _ID.fullmatch(run) is not None
        or _SHA.match(run) is not None
        or not _is_random(run)
    ):
        return match[0]
    before = match.string[max(0, start - _LONGEST_CALL) : start]
    return match[0] if _CALLED.search(before) else _PLACEHOLDER


_LOOSE_HINTS = ("secret", "token", "cred", "auth", "pass", "pw", "parola", "clave", "login", "key")
_COMMAND_HINTS = (
    *("sshpass", "login", "upload", "mysql", "mariadb", "7z", "zip", "redis-cli", "ldap"),
    *("openssl", "curl", "net use", "identified by", "with password", "with encrypted"),
    *("snmp-server", "securestring", "username ", "enable "),
)
_SHAPED_HINTS = (
    *("akia", "asia", "agpa", "aida", "aroa", "anpa", "anva", "aipa", "abia", "acca"),
    *("amzn.mws.", "access", "0.", ":", "|", "$"),
)

KEY_RULES = tuple(
    Rule(Kind.KEY, pattern, replace, tuple(hints), reach)
    for pattern, replace, hints, reach in (
        (_PRIVATE_KEY, _key, ["private key"], None),
        (_PUTTY_KEY, _key, ["putty-user-key-file-"], 0),
        (_COOKIE, _named_key, ["cookie"], len("set-")),
        (_HOOK, _hook, ["://"], 0),
        (_PARAMETER, _named_key, ["?", "&", ";", "#"], 0),
        (_AUTHORIZATION, _named_key, ["authorization"], 0),
        (_NAMED, _named_key, _NAMED_HINTS, _LONGEST_BEFORE_HINT),
        (_NAMED_LOOSELY, _named_key, [*_LOOSE_HINTS, "session", "pat"], 0),
        (_SPOKEN, _named_key, [*_PASSWORD_NAMES, *_LOOSE_HINTS], 0),
        (_OPTION, _named_key, ["pass", "pwd", "token", "secret", "key"], 32),
        (_COMMAND, _named_key, _COMMAND_HINTS, 0),
        (_CODE, _named_key, ["pin", "otp", "cvv", "cvc", "ssn", "code", "social", *_PERSONS], 13),
        (_BEARER, _named_key, ["bearer"], 0),
        (_URL_PASSWORD, _named_key, ["://"], 0),
        (_PREFIXED, _prefixed, [*map(str.lower, _PREFIXES), *_MODES], 10),
        (_SHAPED, _key, _SHAPED_HINTS, None),
        (_RUN, _random_run, [], None),
    )
)
