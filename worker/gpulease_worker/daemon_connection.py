"""How this worker reaches the daemon: the addresses, and the token and certificates that are in files.

A token is replaced, and so is an authority, while workers run: what is in the files is read again after each refusal,
so that no worker has to be restarted for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gpulease.sansio.effects import Result
from gpulease.sansio.failover import Destination, Failover
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import DaemonUnavailable, InvalidRequest, NotAuthenticated
from gpulease_protocol.host import certificates, token_file
from gpulease_protocol.host.addresses import Address, candidates
from gpulease_worker.log_connection import LogConnection, new_transport
from gpulease_worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class DaemonConnection:
    """Connections to the daemon that serves.

    Args:
        settings: Where it is, and the token, which `token_file` has as well where that counts.
        timeout_s: How long an answer may take beyond the time that the daemon may hold it.
    """

    def __init__(self, settings: WorkerSettings, timeout_s: float) -> None:
        self._token_file = settings.token_file
        # Without the proxies of the environment: the daemon is reached directly.
        found = candidates(settings.url)
        self._destination = Destination(
            found,
            True,
            settings.token,
            timeout_s,
            use_proxies=False,
            obeys=True,
            plain_http=settings.plain_http,
            ca_file=certificates.ca_file(found),
        )
        self._failover = Failover(self._destination)
        self._transport = new_transport(self._destination)
        self.logs = LogConnection(self._destination, settings.node)

    @property
    def ca_file(self) -> str | None:
        """File with the certificates that it is trusted by; None for those of the system."""
        return self._destination.ca_file

    @property
    def address(self) -> Address:
        """The address that answered last, or that is tried first."""
        return self._failover.address

    @property
    def is_single(self) -> bool:
        """True if no other daemon may take over."""
        return self._failover.is_single

    def __str__(self) -> str:
        return " or ".join(address.shown for address in self._destination.addresses)

    async def send(self, call: ApiCall[Result]) -> Result:
        """The answer of the daemon. Raises GpuleaseError; after a refusal of the token or of the certificate the next
        call is made with those that are in the files then."""
        try:
            return await self._transport.run(self._failover.send(call))
        except NotAuthenticated:
            self._read_token()
            await self._begin_again()
            raise
        except DaemonUnavailable as error:
            if not error.may_come:
                await self._begin_again()
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self.logs.close()
        await self._transport.close()

    def _read_token(self) -> None:
        if self._token_file is None:
            return
        try:
            token = token_file.read(str(self._token_file), "--token-file")
        except InvalidRequest as error:
            log.debug("the token is not read again: %s", error)
            return
        self._destination = replace(self._destination, bearer_token=token)

    async def _begin_again(self) -> None:
        """Connect again, with the token and the certificates as they are now."""
        await self._transport.close()
        self._failover, self._transport = Failover(self._destination), new_transport(self._destination)
        await self.logs.begin_again(self._destination)
