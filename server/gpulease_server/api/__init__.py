"""The REST API: one router for each noun. Request bodies in, nouns out, every error as `application/problem+json`.

The API never calls NVML and never waits on a node without a limit. It makes no decisions: it creates ids, checks
bodies, submits happenings to the writer and shows what is committed.
"""
