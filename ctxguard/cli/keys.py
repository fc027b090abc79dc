"""``ctxguard keys``: print a command's system file to fill in, with the meaning of each key.

Imports that command; writes to standard output alone.
"""

import textwrap

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli import named
from ctxguard.cli._console import Output
from ctxguard.errors import ConfigurationError

_COLUMNS = 80


class KeysCommand(SettingsModel):
    words: list[str] = setting(
        "The command, such as serve or golden hard-negatives.", "COMMAND", argument=True
    )

    def __call__(self, output: Output) -> None:
        """Save it, and give it to the command as --system. One file serves all commands: the system
        stands at its top, with profile and store, and what one command alone needs in the table of
        its name. Options may stand in that table too, by their names.

        For example: ctxguard keys serve > system.toml
        """
        name = " ".join(self.words)
        sections = named(name).sections()
        if not sections:
            raise ConfigurationError(f"ctxguard {name} takes only options; see its --help")
        for table, keys in sorted(sections.items()):
            if table:
                output.text(f"[{table}]")
            for key, meaning in keys:
                lines = textwrap.wrap(meaning, _COLUMNS - 2, break_on_hyphens=False)
                output.text("\n".join([*(f"# {line}" for line in lines), f"# {key} =", ""]))
