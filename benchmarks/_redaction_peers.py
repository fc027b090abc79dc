"""Well-kept libraries that find secrets and personal data, each as a redactor.

Kingfisher (MongoDB's scanner for keys, its Rust library in this process, with all its built-in
rules) and DataFog (personal data, by its patterns). Both release monthly, install from PyPI, and
need neither a network nor a model; presidio-analyzer needs spaCy's models, and detect-secrets had
its last release in 2024. ``ImportError`` where one is not installed.
"""

from collections.abc import Callable
from importlib.metadata import version

Redactor = Callable[[str], str]


def kingfisher() -> Redactor:
    """Kingfisher, down to its rules of low confidence: the most that it finds."""
    from kingfisher_sdk import Rules, Scanner

    scanner = Scanner(Rules(confidence="low"))

    def redact(text: str) -> str:
        # The longest first: one finding can lie in another.
        for secret in sorted({found.secret for found in scanner.scan(text)}, key=len, reverse=True):
            text = text.replace(secret, "[key]")
        return text

    return redact


def datafog() -> Redactor:
    """DataFog's patterns, but those for dates and postal codes, which are no secrets here."""
    import datafog

    kinds = ["EMAIL", "PHONE", "SSN", "CREDIT_CARD", "IP_ADDRESS"]

    def redact(text: str) -> str:
        redacted: str = datafog.redact(text, entity_types=kinds).redacted_text
        return redacted

    return redact


def both() -> Redactor:
    """DataFog on what Kingfisher leaves."""
    first, second = kingfisher(), datafog()
    return lambda text: second(first(text))


PEERS: dict[str, tuple[Callable[[], Redactor], tuple[str, ...]]] = {
    "Kingfisher": (kingfisher, ("kingfisher-secret-scanner",)),
    "DataFog": (datafog, ("datafog",)),
    "Kingfisher, then DataFog": (both, ("kingfisher-secret-scanner", "datafog")),
}


def versions(packages: tuple[str, ...]) -> str:
    """The installed releases.

    Raises:
        ImportError: one is not installed.
    """
    return ", ".join(f"{package} {version(package)}" for package in packages)
