"""Programs that look at a machine, a corpus, a loader or a run. No other package but integrations imports this one.

`doctor`: six checks of the machine, each a `Check` with a remedy. Works on a broken installation.
`report`: one HTML page on a corpus and its runs, facts first; `page` and `charts` draw. Sections: `gallery`,
  `corpus`, `runs` (one table of how each was made, and its scores), `queries` (what a trained model finds).
`profile`: measures any loader; `remedies` tries what would make it faster.
`epoch`: an epoch of a plan in words. `replay`: one row, made again as in its batch.
`paired`: differences of runs, paired by their seeds.
"""
