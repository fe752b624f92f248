"""Names of HTTP headers that are gpulease's own."""

from __future__ import annotations

REQUEST_ID_HEADER = "x-request-id"
NO_SNIFFING = {"x-content-type-options": "nosniff"}
"""On every answer, see `middleware.no_sniffing`."""
AS_OF, STANDBY = "Gpulease-As-Of", "Gpulease-Standby"
"""On an answer that may be stale: when its data was read, and the address of the writer. See `stale_reads`."""
LOG_OFFSET, LOG_BYTES, LOG_KEPT_BYTES = "Gpulease-Log-Offset", "Gpulease-Log-Bytes", "Gpulease-Log-Kept-Bytes"
"""On a log: where the answer begins, how long the log is, and how much of that has not been dropped."""
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""On a stream: nginx passes on each piece as it comes."""
