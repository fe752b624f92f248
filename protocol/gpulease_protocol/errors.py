"""Every error that gpulease raises or answers, each with a stable code.

```
GpuleaseError
├── InvalidRequest (ValueError)    ├── LeaseLost            ├── OverQuota
├── NeverFits (ValueError)         ├── StaleToken           ├── IdempotencyMismatch
├── NotNow (RuntimeError)          ├── NotAuthenticated     ├── Unavailable
├── NotFound                       ├── NotAllowed           ├── DaemonUnavailable (RuntimeError)
├── InUse                          ├── TooLarge             ├── UnknownOrdinals (RuntimeError)
├── MethodNotAllowed               ├── TooSlow              └── MaskLatched (RuntimeError)
                                   └── EventsPruned
```

The server answers an error as `application/problem+json` with its `code`; the client raises the class of that code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from gpulease_protocol.explanation import Explanation

DOCS = "/docs"
"""The page of a daemon with an anchor for each code."""


def shortened(text: str, limit: int = 80) -> str:
    """`text` for a message: all of it, or its beginning and its length, so that no message is too long.

    Example: `shortened("x" * 500, 3)` is `"xxx... (500 characters)"`.
    """
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class GpuleaseError(Exception):
    """Something went wrong that has no narrower name. `detail` says what and why, `remedy` what to do."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, remedy: str = "", extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{detail} {remedy}".strip())
        self.detail = detail
        self.remedy = remedy
        self.extra: dict[str, Any] = dict(extra or {})
        """Further members of the problem document, such as `explanation`."""

    @property
    def explanation(self) -> Explanation | None:
        """Who is in the way of the request that was refused, GPU by GPU; None where the daemon did not explain."""
        from gpulease_protocol.codec import from_json  # noqa: PLC0415 - most programs never ask
        from gpulease_protocol.explanation import Explanation  # noqa: PLC0415

        found = self.extra.get("explanation")
        return from_json(Explanation, found) if isinstance(found, Mapping) else found

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 document for this error."""
        body: dict[str, Any] = {
            "type": f"{DOCS}#{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.remedy:
            body["remedy"] = self.remedy
        return body | self.extra


class InvalidRequest(GpuleaseError, ValueError):
    """The request is not well formed. Correct the field that `detail` names."""

    code, status, title = "invalid_request", 422, "Invalid request"


class TooLarge(InvalidRequest):
    """The body is over 1 MiB, or 4 MiB for a job or the report of a node, or has over 16,384 commas. Send less."""

    code, status, title = "too_large", 413, "Request too large"


class TooSlow(InvalidRequest):
    """The request did not arrive in time. Send it again without pauses."""

    code, status, title = "too_slow", 408, "Request too slow"


class NeverFits(GpuleaseError, ValueError):
    """No node has such GPUs, so waiting does not help. Ask for fewer or other GPUs."""

    code, status, title = "never_fits", 422, "Never fits"


class NotNow(GpuleaseError, RuntimeError):
    """The GPUs are in use and the request would not wait. Try again later, or let it queue."""

    code, status, title = "not_now", 409, "Not now"


class InUse(GpuleaseError, RuntimeError):
    """A lease is active on what would be taken out of use: wait until it has ended, or say force. Or the node to be
    forgotten reports: turn its host off first. Or GPUs are reserved for the group: cancel that first."""

    code, status, title = "in_use", 409, "In use"


class NotFound(GpuleaseError):
    """There is no resource of this name. Check the id."""

    code, status, title = "not_found", 404, "Not found"


class MethodNotAllowed(GpuleaseError):
    """This address does not take that method."""

    code, status, title = "method_not_allowed", 405, "Method not allowed"


class LeaseLost(GpuleaseError):
    """The lease has ended and its GPUs may be someone else's. Stop using them."""

    code, status, title = "lease_lost", 410, "Lease lost"


class EventsPruned(GpuleaseError):
    """Events after the `seq` that was asked for are no longer kept. Continue after `pruned_seq`, and expect a gap."""

    code, status, title = "events_pruned", 410, "Events pruned"

    @property
    def pruned_seq(self) -> int:
        """The last `seq` that is gone: `events(after=pruned_seq)` has all that is kept."""
        return int(self.extra.get("pruned_seq", 0))


class StaleToken(GpuleaseError):
    """The token is not that of the lease's grant. Only its holder can act on a lease."""

    code, status, title = "stale_token", 412, "Stale token"


class NotAuthenticated(GpuleaseError):
    """The daemon cannot identify the caller. Send a token."""

    code, status, title = "not_authenticated", 401, "Not authenticated"


class NotAllowed(GpuleaseError):
    """The caller may not do this."""

    code, status, title = "not_allowed", 403, "Not allowed"


class OverQuota(GpuleaseError):
    """A bound is reached. End something, or ask again later.

    With status 422 instead, the request alone exceeds a limit: it would never be granted. Ask for less.
    """

    code, status, title = "over_quota", 429, "Over quota"
    retry_after_s: float | None = None
    """When to try again, in seconds; None if the daemon does not say."""


class IdempotencyMismatch(GpuleaseError):
    """The Idempotency-Key was used before with another body. Use a new key for a new request."""

    code, status, title = "idempotency_mismatch", 422, "Idempotency mismatch"


class Unavailable(GpuleaseError):
    """The daemon cannot record its answer now. Nothing was done, unless `outcome` is `unknown`. Ask again."""

    code, status, title = "unavailable", 503, "Unavailable"
    retry_after_s: float | None = None
    """When to try again, in seconds; None if the server does not say."""


class DaemonUnavailable(GpuleaseError, RuntimeError):
    """No daemon answers. Look at `systemctl status gpulease`, or ask the administrator."""

    code, status, title = "daemon_unavailable", 503, "Daemon unavailable"
    may_come: bool = True
    """False if something answers that is not trusted or speaks otherwise, so that waiting does not help."""


class UnknownOrdinals(GpuleaseError, RuntimeError):
    """Which GPUs CUDA's numbers mean in this process is not known, or none of these GPUs can be leased. Nothing was
    reserved. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name whole GPUs by UUID in CUDA_VISIBLE_DEVICES."""

    code, title = "unknown_ordinals", "Unknown CUDA ordinals"


class MaskLatched(GpuleaseError, RuntimeError):
    """CUDA is initialized, so CUDA_VISIBLE_DEVICES no longer has an effect. Ask for GPUs before CUDA is used."""

    code, title = "mask_latched", "Mask latched"


def respelled(remedy: str, words: Mapping[str, str]) -> str:
    """A daemon's remedy in the words of another interface: a daemon names routes and fields of REST in backticks.

    Args:
        remedy: Such as "`GET /v1/jobs` lists them."
        words: What to write for a route or field. `{}` stands for the same id in both. Others stay as they are.
    """

    def in_other_words(quoted: re.Match[str]) -> str:
        for rest, other in words.items():
            if found := re.fullmatch(re.escape(rest).replace(r"\{\}", "([^/]+)"), quoted[1]):
                return f"`{other.format(*found.groups())}`"
        return quoted[0]

    return re.sub("`([^`]+)`", in_other_words, remedy)


ERRORS_BY_CODE: dict[str, type[GpuleaseError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        TooLarge,
        TooSlow,
        NeverFits,
        NotNow,
        InUse,
        NotFound,
        MethodNotAllowed,
        LeaseLost,
        EventsPruned,
        StaleToken,
        NotAuthenticated,
        NotAllowed,
        OverQuota,
        IdempotencyMismatch,
        Unavailable,
        DaemonUnavailable,
    )
}
"""The class for each code that a daemon may answer."""

for _kind in (GpuleaseError, UnknownOrdinals, MaskLatched, *ERRORS_BY_CODE.values()):
    _kind.__module__ = "gpulease"  # the name that is documented, and that a traceback begins with


def error_from_problem(problem: Mapping[str, Any]) -> GpuleaseError:
    """The exception for a problem document, of the class of its `code`."""
    known = {"type", "title", "status", "code", "detail", "remedy"}
    kind = ERRORS_BY_CODE.get(str(problem.get("code")), GpuleaseError)
    return kind(
        str(problem.get("detail") or problem.get("title") or "the daemon answered with an error"),
        remedy=str(problem.get("remedy") or ""),
        extra={key: value for key, value in problem.items() if key not in known},
    )
