"""Finds the folder for files that ctxguard can make again; reads the environment alone."""

from pathlib import Path

import platformdirs

from ctxguard.errors import ConfigurationError


def cache_folder() -> Path:
    """Return the user's cache folder for ctxguard, which may not exist yet.

    On Linux ``$XDG_CACHE_HOME/ctxguard``, by default ``~/.cache/ctxguard``; elsewhere where the
    system keeps caches.

    Raises:
        ConfigurationError: the user has no home folder.
    """
    try:
        return platformdirs.user_cache_path("ctxguard", appauthor=False)
    except RuntimeError as error:
        raise ConfigurationError(
            "there is no home folder to keep a cache in; set XDG_CACHE_HOME to a folder that can "
            "hold it"
        ) from error
