"""Commands that the worker adds to the program: `gpulease worker` and `doctor`; entry points in pyproject.toml."""
