"""The switch to a profile's safe policy, by the file that the guards watch."""

from pathlib import Path

from ctxguard.errors import ProfileError
from ctxguard.profile import Profile

FORMER_SUFFIX = ".before-alarm"


def switch_to_safe(path: Path | str, alarmed: Profile) -> bool:
    """Put the safe policy of a profile in its place, and the former beside it.

    The former is kept as ``<path>.before-alarm``: rename it back to undo the switch. Both files
    are written atomically; the former first, so that it is never lost.

    Args:
        path: The profile file that guards watch.
        alarmed: The profile that the alarm is about.

    Returns:
        Whether the file was changed; False where it holds the safe policy already.

    Raises:
        ProfileFormatError: the file is absent or no profile.
        ProfileError: the file holds another profile by now, which this alarm says nothing of, or
            the profile names no safe policy.
        OSError: the file or its folder cannot be written.
    """
    path = Path(path)
    safe = alarmed.safe()
    found = Profile.load(path)
    if found.profile_id == safe.profile_id:
        return False
    if found.profile_id != alarmed.profile_id:
        raise ProfileError(
            f"{path} holds profile {found.profile_id} by now, and the alarm is about "
            f"{alarmed.profile_id}: left as it is"
        )
    found.save(path.with_name(path.name + FORMER_SUFFIX))
    safe.save(path)
    return True
