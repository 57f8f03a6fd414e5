"""Records, the API that users touch: load, save, and write one tensor at a time."""
