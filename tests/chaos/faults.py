"""Every fault, by its name: the modules that are imported here add theirs to the table."""

# ruff: noqa: F401
import fleet_faults
import leg_faults
import process_faults
import reload_faults
import reranker_faults
import sample_faults
from serving import FAULTS

__all__ = ["FAULTS"]
