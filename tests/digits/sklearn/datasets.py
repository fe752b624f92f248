"""The one function that the examples use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def load_digits(*, return_X_y: bool) -> tuple[Any, Any]:
    """The 1,797 images of 64 pixels and their digits, out of the file of the scikit-learn that is installed."""
    assert return_X_y
    for place in sys.path:
        file = Path(place, "sklearn", "datasets", "data", "digits.csv.gz")
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    raise ModuleNotFoundError("scikit-learn is not installed")
