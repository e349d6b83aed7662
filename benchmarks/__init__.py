"""The project's own benchmarks: `python -m benchmarks`, in the folder of the repository. Not part of the wheel."""
