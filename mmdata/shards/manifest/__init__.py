"""The list of a folder's shards: manifest.json, and pages of 1,024 shards each.

- `manifest`: reads it and answers for it; `top`: the fields of manifest.json, their hashes and checks.
- `pages`: one Arrow file of entries, with `histogram`: captions of a shard by length and aspect ratio.
- `writer`: writes pages first and manifest.json last. `distinct`: no tar stands in two folders of one index.
"""
