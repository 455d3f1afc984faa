"""Commands about images and captions: from a raw corpus to shards, and what is known of them."""
