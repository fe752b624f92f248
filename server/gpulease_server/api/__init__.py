"""The REST API: one router per noun. Bodies in, nouns out, every error as `application/problem+json`.

The API never calls NVML and never waits on a node without a bound. It decides nothing: it makes ids, checks bodies,
passes happenings to the writer and shows what is committed.
"""
