"""CPU work on a sample: images, text, collate. What a row becomes depends on (row, epoch, seed) alone."""
