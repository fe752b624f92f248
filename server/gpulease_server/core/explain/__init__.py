"""Why a request waits."""
