"""What-if: recorded requests under another policy."""
