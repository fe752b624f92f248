"""What torchmetrics looks at."""

hamming = None
