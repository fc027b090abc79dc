"""Keeps the profiles that were replaced beside the file in force, to return to one of them.

`Profile.save` keeps the former here whenever it writes over another: in the folder
``<file>.history``, one file each, the newest `MOST_KEPT` of them.
"""

import getpass
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import AwareDatetime, ValidationError

from ctxguard._support.atomic_write import SHARED, atomic_write, lock
from ctxguard._support.regular_file import read_regular
from ctxguard.errors import ProfileError, ProfileFormatError
from ctxguard.profile.schema import Frozen, Profile

MOST_KEPT = 20

_MAX_BYTES = 8 * 2**20
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{12}\.json")
_TRIES, _WAIT_SECONDS = 50, 0.1
"""Before another writer is no longer waited for."""


class FormerProfile(Frozen):
    """A profile that another replaced: when, who did it (user@host), and why, if somebody said."""

    profile: Profile
    replaced_at: AwareDatetime
    replaced_by: str
    why: str


def former_profiles(path: Path | str) -> tuple[FormerProfile, ...]:
    """The profiles that were replaced in a file, newest first; without those that are damaged."""
    kept = []
    for file in _newest_first(_folder(Path(path))):
        with suppress(OSError, ValidationError):
            content = read_regular(file, _MAX_BYTES)
            kept.append(FormerProfile.model_validate_json(content, strict=True))
    return tuple(kept)


def roll_back(path: Path | str, profile_id: str) -> FormerProfile:
    """Put a former profile in force again; the one that it replaces is kept like any other.

    Args:
        path: The file of the profile in force.
        profile_id: Of the former profile, or the beginning of it.

    Raises:
        ProfileError: there is no such profile, or there are several.
        OSError: the file cannot be written.
    """
    former = former_profiles(path)
    ids = dict.fromkeys(each.profile.profile_id for each in former)
    found = [each for each in ids if profile_id and each.startswith(profile_id)]
    if len(found) != 1:
        many = f"{path} had {len(found)} profiles whose id begins with {profile_id!r}"
        raise ProfileError(
            f"{many if found else f'{path} never had profile {profile_id!r}'}; those that are kept "
            f"are {', '.join(ids) or 'none'}"
        )
    [chosen] = found
    again = next(each for each in former if each.profile.profile_id == chosen)
    again.profile.save(path, why=f"rolled back to {chosen}")
    return again


@contextmanager
def keeping_former(path: Path, successor: Profile, why: str) -> Iterator[None]:
    """Keep the profile that a file holds while the block writes another over it.

    A file that is no profile, or the same, is not kept. The former is written first, so that
    neither is lost whenever the process ends.

    Raises:
        OSError: it cannot be kept; the block did not run.
    """
    folder, former = _folder(path), _profile_in(path)
    if former in (None, successor):
        yield
        return
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, SHARED)
    try:
        for _ in range(_TRIES):
            if lock(descriptor):
                break
            time.sleep(_WAIT_SECONDS)
        former = _profile_in(path)  # once more: another writer may have been first
        kept = None if former is None else _keep(folder, former, why)
        try:
            yield
        except BaseException:
            if kept is not None:
                kept.unlink(missing_ok=True)
            raise
        for old in _newest_first(folder)[MOST_KEPT:]:
            old.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _profile_in(path: Path) -> Profile | None:
    with suppress(ProfileFormatError):
        return Profile.load(path)
    return None


def _keep(folder: Path, former: Profile, why: str) -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    now, who = datetime.now(UTC), f"{user}@{socket.gethostname()}"
    kept = FormerProfile(profile=former, replaced_at=now, replaced_by=who, why=why)
    file = folder / f"{now:%Y%m%dT%H%M%S.%f}Z-{former.profile_id}.json"
    with atomic_write(file, mode=SHARED) as stream:
        stream.write(kept.model_dump_json(indent=2).encode())
    return file


def _newest_first(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted([each for each in folder.iterdir() if _NAME.fullmatch(each.name)])[::-1]
    return []


def _folder(path: Path) -> Path:
    return path.with_name(path.name + ".history")
