"""`GET /metrics`, for Prometheus."""
