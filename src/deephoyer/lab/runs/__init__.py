"""The folder of a run: its state, its checkpoints, and where it took place."""
