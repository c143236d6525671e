"""Training of LoRAs: data, recipe, loop and files. Imports neither torch nor jax; a backend's
`Trainer` computes."""
