"""What a run says of itself: its lines and metrics.jsonl, and what they mean."""
