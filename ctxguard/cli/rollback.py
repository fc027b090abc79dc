"""``ctxguard rollback``: list the profiles that were replaced in a file, and return to one."""

from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, print_json
from ctxguard.cli._tables import TextTable
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from ctxguard.profile.schema import Profile


class Rollback(SettingsModel):
    """Settings of ``ctxguard rollback``."""

    profile: Path = setting("The profile file that guards watch.", "FILE", argument=True)
    to: str | None = optional(
        "Id of the profile to return to, or its beginning; without it they are listed.",
        "ID",
        argument=True,
    )
    as_json: _options.AsJson = False


def rollback(settings: Rollback) -> None:
    """List the profiles that a file held before, or return to one of them.

    Whatever writes a profile over another keeps the former beside it, the
    newest 20, with who replaced it, when and why. The profile that is rolled
    back is kept too. A guard that watches the file serves by it in seconds.
    """
    from ctxguard.profile.history import former_profiles, roll_back
    from ctxguard.profile.schema import Profile

    output = Output(as_json=settings.as_json)
    if settings.to is not None:
        again = roll_back(settings.profile, settings.to).profile
        policies = [
            f"{route.value}: {describe_policy(own.policy)}" for route, own in again.routes.items()
        ]
        if settings.as_json:
            print_json({"in_force": again.profile_id, "verdict": again.verdict})
            return
        output.facts(
            [
                ("in force", f"{settings.profile} holds profile {again.profile_id} again"),
                ("verdict", _verdict(again)),
                ("policy", "; ".join(policies)),
            ]
        )
        return
    present = Profile.load(settings.profile)
    rows = TextTable(
        "profile", "replaced", "by", "why", "verdict", title=f"Before {settings.profile}"
    )
    former = former_profiles(settings.profile)
    if settings.as_json:
        print_json(
            {
                "in_force": present.profile_id,
                "former": [
                    {
                        "profile_id": each.profile.profile_id,
                        "replaced_at": each.replaced_at,
                        "replaced_by": each.replaced_by,
                        "why": each.why,
                        "verdict": each.profile.verdict,
                    }
                    for each in former
                ],
            }
        )
        return
    for each in former:
        rows.add_row(
            each.profile.profile_id,
            f"{each.replaced_at:%Y-%m-%d %H:%M} UTC",
            each.replaced_by,
            each.why or "not said",
            _verdict(each.profile).partition(":")[0],
        )
    output.facts([("in force", f"profile {present.profile_id}, {_verdict(present)}")])
    if former:
        output.out.print(rows)
        output.note(f"`ctxguard rollback {settings.profile} ID` returns to one")
    else:
        output.note(f"{settings.profile} never held another profile")


def _verdict(profile: "Profile") -> str:
    return "without a verdict" if profile.verdict is None else profile.verdict.statement
