"""``ctxguard rollback``: list the profiles that were replaced in a file, and return to one."""

from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, picked
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from ctxguard.profile.schema import Profile


class RollbackCommand(SettingsModel):
    profile: Path = setting("The profile file that guards watch.", "FILE", argument=True)
    to: str | None = optional(
        "Id of the profile to return to, or its beginning; without it they are listed.",
        "ID",
        argument=True,
    )
    as_json: _options.AsJson = False

    def __call__(self, output: Output) -> None:
        """Whatever writes a profile over another keeps the former beside it, the newest 20.

        Each is kept with who replaced it, when and why, and so is the profile that is rolled back.
        A guard that watches the file serves by it in seconds.
        """
        from ctxguard.profile.history import former_profiles, roll_back
        from ctxguard.profile.schema import Profile

        if self.to is not None:
            again = roll_back(self.profile, self.to).profile
            policies = (
                f"{at.value}: {describe_policy(by.policy)}" for at, by in again.routes.items()
            )
            output.result(
                {"in_force": again.profile_id, "verdict": again.verdict},
                lambda: output.facts(
                    ("in force", f"{self.profile} holds profile {again.profile_id} again"),
                    ("verdict", _verdict(again)),
                    ("policy", "; ".join(policies)),
                ),
            )
            return
        present, former = Profile.load(self.profile), former_profiles(self.profile)

        def show() -> None:
            output.facts(("in force", f"profile {present.profile_id}, {_verdict(present)}"))
            if not former:
                output.note(f"{self.profile} never held another profile")
                return
            rows = (
                (
                    each.profile.profile_id,
                    f"{each.replaced_at:%Y-%m-%d %H:%M} UTC",
                    each.replaced_by,
                    each.why or "not said",
                    _verdict(each.profile).partition(":")[0],
                )
                for each in former
            )
            columns = ("profile", "replaced", "by", "why", "verdict")
            output.table(columns, rows, f"Before {self.profile}")
            output.note(f"`ctxguard rollback {self.profile} ID` returns to one")

        listed = [
            {
                "profile_id": each.profile.profile_id,
                **picked(each, "replaced_at", "replaced_by", "why"),
                "verdict": each.profile.verdict,
            }
            for each in former
        ]
        output.result({"in_force": present.profile_id, "former": listed}, show)


def _verdict(profile: "Profile") -> str:
    return "without a verdict" if profile.verdict is None else profile.verdict.statement
