"""Saves what can be saved of damaged tars: new tars, with accounts of what was found, kept and dropped.

`salvage` reads a tar tolerantly: members, and what of the tar is none. `choose` says which members make whole samples.
`repair` writes these into new tars, and `output` publishes them whole. `accounts` counts all of it in a ledger.
"""

from mmdata.repair.accounts import Dropped, Report
from mmdata.repair.repair import repair_tars

__all__ = ["Dropped", "Report", "repair_tars"]
