"""Converts raw corpora to shards. Rows in = written + merged + duplicate + filtered + quarantined, or all is undone.

`open_source` opens a folder, a table or tars as a `Source`, which gives `InputRow`s in one fixed order, and `open_rows`
the dicts of a program. `fetched` brings tables behind a URL to this machine first. COCO's annotations are a source
whose images have boxes or captions, `ChosenSource` is some rows of another source. `Merges` says which rows of one
image become one sample. `Units` cuts the rows into ranges, and an engine makes a unit of each, in processes, threads or
with Ray: `fetch` replaces URLs by the bytes of the images, an `Examiner` turns a row into a sample or a fault,
`UnitWriter` writes tars and records, and `Staging` commits the unit.
`Conversion` runs the whole. When all units are there, a `Settler` finds duplicates, and an `OutputFolder` puts shards
together and counts in `Accounts` what became of each row.
`Output` is the folder: the conversion is made in a hidden sub-folder and moved into place whole, the manifest last.
`preview` converts a sample of the rows into a temporary folder, and says what becomes of all.
"""

from mmdata.config.convert import ConvertConfig, load_recipe
from mmdata.convert.convert import PartReport, Report, convert, convert_part
from mmdata.convert.preview import Preview, preview
from mmdata.convert.settle.accounts import Accounts

__all__ = [
    "Accounts",
    "ConvertConfig",
    "PartReport",
    "Preview",
    "Report",
    "convert",
    "convert_part",
    "load_recipe",
    "preview",
]
