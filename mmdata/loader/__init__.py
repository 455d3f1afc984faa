"""The loader: executes a plan with workers, and owns the state."""

from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.loader import Loader
from mmdata.loader.stats import Stats
from mmdata.loader.worker import Worker

__all__ = ["LedgerEntry", "Loader", "Stats", "Worker"]
