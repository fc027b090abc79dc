"""Every surface, by its name: the rooms that are imported here add theirs to the table."""

from tests.fuzz import call_surfaces, command_surface, file_surfaces, http_surfaces  # noqa: F401
from tests.fuzz.surface import SLOW, SURFACES

__all__ = ["SLOW", "SURFACES"]
