"""Commands that the server adds to the program: `gpulease serve` and `db`; entry points in pyproject.toml."""
