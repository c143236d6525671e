"""LoRA files: their tensors by key, the names and scales in them, and the changes of weights."""
