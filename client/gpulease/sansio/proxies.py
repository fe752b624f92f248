"""The proxies that the environment names for the way to other hosts: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gpulease.sansio.effects import NotConnected, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.addresses import Address

Made = TypeVar("Made")
SCHEMES = ("http", "https", "all")


def with_proxies(make: Callable[[bool], Made], address: Address, destination: Destination) -> Made:
    """A client of httpx2 for an address, which `make` returns; its argument: whether to use the environment's proxies.

    Raises InvalidRequest for a proxy that httpx2 cannot use. It is of each of them, whether or not it is needed here.
    """
    if not _may_use_one(address, destination):
        return make(False)
    try:
        return make(True)
    except (ImportError, ValueError) as error:
        host = urlsplit(address.origin).hostname
        raise InvalidRequest(
            f"A proxy that the environment names ({_variables(SCHEMES)}) cannot be used: {_reason(error)}.",
            remedy=f"Add {host} to NO_PROXY, if it is reached without a proxy; or take the variable away.",
        ) from error


def named(
    failure: NotConnected | ResponseLost, address: Address, destination: Destination
) -> NotConnected | ResponseLost:
    """A failure, which says so where the connection was to a proxy."""
    variables = _variables((urlsplit(address.origin).scheme, "all")) if _may_use_one(address, destination) else ""
    if not variables or not isinstance(failure, NotConnected):
        return failure
    return NotConnected(f"{failure}; through the proxy of {variables}, as NO_PROXY does not name the daemon's host")


def _may_use_one(address: Address, destination: Destination) -> bool:
    if address.local or not destination.use_proxies:
        return False
    return not proxy_bypass(urlsplit(address.origin).hostname or "")


def _variables(schemes: tuple[str, ...]) -> str:
    """The variables that name a proxy for one of these."""
    found = getproxies()
    return ", ".join(f"{scheme.upper()}_PROXY" for scheme in schemes if found.get(scheme))


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "SOCKS takes the package socksio, which is not installed"
    return "it is neither of http, https, nor socks5"
