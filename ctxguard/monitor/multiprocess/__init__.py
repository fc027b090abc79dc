"""What many serving processes counted, exported by one (``PROMETHEUS_MULTIPROC_DIR``).

``collector`` is what a scrape asks; ``files`` finds, tidies and folds the workers' files, and
``entries`` reads them.
"""

from ctxguard.monitor.multiprocess.collector import (
    SafeMultiProcessCollector,
    merged,
    registry_for_scrape,
)

__all__ = ["SafeMultiProcessCollector", "merged", "registry_for_scrape"]
