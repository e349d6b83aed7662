"""The project's own measurements: `python -m benchmarks`, from the repository's folder. Not part of the wheel."""
