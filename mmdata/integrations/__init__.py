"""mmdata in the training loops of other libraries. Each file needs its own extra and is imported by name only.

`lightning`: `LoaderDataModule` gives each rank its batches, and resumes at the next batch.
`huggingface`: `LoaderTrainer` is a Trainer on `data.shards` and `data.val`; `as_dataset` gives rows to other trainers.
`grain`: `LoaderDataset` is a Grain dataset of batches.
`adapt`: what a foreign loop needs: ranks that fail together for bad rows, and a check of the launcher.
Batches stay as the loader makes them: no framework samples, shards or collates them again; but for `as_dataset`.
"""
