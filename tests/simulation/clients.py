"""Those who ask: holders of every temper, an administrator, and a client that follows the event log."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.simulation.network import NoAnswer, request

if TYPE_CHECKING:
    from tests.simulation.world import World

Line = dict[str, Any]
EVE = 4242
"""The uid of a hostile user."""
ZOE = 4343
"""That of a user for whom no limits are set."""
TOKEN_ID = "token-played"
BEARER = f"{TOKEN_ID}.played"
"""A bearer token of root, where there are budgets."""
SHORTER = 1800
"""Windows of GPU-hours are so many times shorter than what an administrator says: an hour is 2 s."""


class PlayedClient:
    """Asks for GPUs again and again, and writes down what it was told."""

    def __init__(self, world: World, name: str, uid: int | None = None, bearer: str | None = None) -> None:
        self.world = world
        self.name = name
        self.uid = uid
        self.bearer = bearer

    async def run(self) -> None:
        """One request after the other, until everything is calm. With shares, the one user asks for each GPU by itself,
        and the other withdraws some of their requests and asks again."""
        for number in itertools.count(1):
            await asyncio.sleep(self.world.chance.uniform(0.0, 1.0))
            if self.world.calm:
                return
            key = f"{self.name}-{number}"
            parts = self.world.chance.choice((1, 2, 3)) if self.world.shares and self.uid == EVE else 1
            if parts > 1:
                await asyncio.gather(*(self._one(f"{key}-{part}") for part in range(parts)))
            else:
                await self._one(key, asks_again=self.world.shares and self.uid == ZOE and self.world.happens(0.5))

    def _body(self, key: str) -> Line:
        """What is asked for."""
        chance = self.world.chance
        body: Line = {
            "count": chance.choice((1, 1, 1, 1, 2, 2, 3, 4)),
            "ttl_s": chance.choice((1.5, 3.0, 6.0, 12.0)),
            "queue": chance.random() < 0.9,
            "label": key,
        }
        if self.world.gangs:
            body |= {"count": chance.choice((1, 1, 2)), "nodes": chance.choice((1, 2, 2, 3, 3, 4))}
        if self.world.priorities:
            body |= {"priority": chance.choice(("interactive", "interactive", "interactive", "normal", "scavenge"))}
            body |= {"time_s": chance.choice((20.0, 3600.0))}
        if self.world.crowd:
            body |= {"count": chance.choice((1, 1, 1, 1, 1, 2, 4)), "queue": True, "ttl_s": chance.choice((3.0, 6.0))}
            body |= {"priority": chance.choice(("interactive", "normal", "normal", "normal", "scavenge"))}
            body |= {"time_s": time_s} if (time_s := chance.choice((None, None, 2.0, 60.0))) is not None else {}
        elif self.world.preemption:
            body |= {"priority": chance.choice(("interactive", "normal", "scavenge", "scavenge")), "queue": True}
            body["ttl_s"] = chance.choice((3.0, 6.0))
        if self.world.preemption:
            self._say_who_may_end(body)
        if self.world.reclaim:
            body |= {"priority": chance.choice(("interactive", "interactive", "normal")), "queue": True}
            body |= {"count": chance.choice((1, 1, 2)), "ttl_s": chance.choice((2.0, 3.0))}
        times = None if self.world.crowd or not self.world.reservations else (None, None, 2.0, 20.0, 3600.0)
        if times and (time_s := chance.choice(times)) is not None:
            body["time_s"] = time_s
        if self.world.shares:
            body |= {"count": 1 if self.uid == EVE else chance.choice((1, 1, 2, 3)), "queue": True}
        elif self.world.fair_share:
            body["count"] = 1 if self.uid == ZOE else chance.choice((1, 3, 4))
        return body

    def _say_who_may_end(self, body: Line) -> None:
        """Some agree to end for others. Beside jobs that do, no lease does."""
        if self.world.jobs:
            body["priority"] = self.world.chance.choice(("interactive", "normal", "normal"))
        elif body["priority"] != "scavenge" and self.world.chance.random() < 0.3:
            body["preemptible"] = True

    async def _one(self, key: str, *, asks_again: bool = False) -> None:
        body = self._body(key)
        begun_s = self.world.now_s
        lease = await self._ask(key, body)
        if asks_again and lease is not None:
            await asyncio.sleep(self.world.chance.uniform(0.0, 1.0))
            self._give_up(key)
            await self._release(lease)
            await self._one(f"{key}-again")
            return
        if lease is not None and lease["state"] == "queued":
            lease, begun_s = await self._wait(key, lease, begun_s)
        if lease is None:
            return
        if lease["state"] == "active":
            await self._hold(lease, begun_s)
        elif lease["token"] is None:
            self.world.see("gave_up", key=key)

    async def _call(self, method: str, path: str, body: Line | None = None, **how: Any) -> tuple[int, Any]:
        return await self.world.network.call(self.name, method, path, body, uid=self.uid, bearer=self.bearer, **how)

    async def _ask(self, key: str, body: Line) -> Line | None:
        while True:
            sent_s = self.world.now_s
            try:
                status, told = await self._call("POST", "/v1/leases", body, key=key)
            except NoAnswer:
                self.world.lines.append({"what": "asked", "key": key, "sent_s": sent_s, "at_s": None})
                if self.world.happens(0.02):
                    return self._give_up(key)
                await asyncio.sleep(self.world.chance.uniform(0.01, 0.3))
                continue
            line = self._told("asked", sent_s, status, told, key=key)
            if status in (201, 202):
                return told  # type: ignore[no-any-return]
            if status not in (500, 503):
                line["final"] = True
                return None
            await asyncio.sleep(self.world.chance.uniform(0.05, 0.5))

    def _give_up(self, key: str) -> None:
        self.world.step(f"{self.name} gives up {key}")
        self.world.see("gave_up", key=key)

    def _told(self, what: str, sent_s: float, status: int, told: Line, **more: Any) -> Line:
        line = {"what": what, "sent_s": sent_s, "at_s": self.world.now_s, "status": status, **more}
        line |= {"lease": told} if status < 300 else {"code": told["code"]}
        self.world.lines.append(line)
        return line

    async def _wait(self, key: str, lease: Line, queued_s: float) -> tuple[Line | None, float]:
        """The lease once it is granted or has ended, and when the last call was sent that found it queued."""
        while lease["state"] == "queued":
            if self._may_wait_for_a_day() or self.world.happens(0.01):
                self._give_up(key)
                return None, queued_s
            if self.world.happens(0.015):
                self._give_up(key)
                await self._release(lease)
                return None, queued_s
            sent_s = self.world.now_s
            wait_s = min(lease["ttl_s"] / 3, 5.0)
            path = f"/v1/leases/{lease['id']}?wait_s={wait_s:.3f}&wait_while=queued"
            try:
                status, told = await self._call("GET", path, patience_s=wait_s + 2, twice=False)
            except NoAnswer:
                await asyncio.sleep(self.world.chance.uniform(0.01, 0.2))
                continue
            waited = {"lease_id": lease["id"], "waited": True, "trusted_from": queued_s}
            self._told("shown", sent_s, status, told, **waited)
            if status != 200:
                await asyncio.sleep(0.1)
                continue
            lease = told
            if lease["state"] == "queued":
                queued_s = sent_s
                await asyncio.sleep(0.01)
        return lease, queued_s

    def _may_wait_for_a_day(self) -> bool:
        """True now and then, once everything is calm, for one whose token's hours may be used until the next day."""
        is_calm = self.world.token_budgets and self.bearer is not None and self.world.calm
        return is_calm and self.world.chance.random() < 0.2

    async def _hold(self, lease: Line, trusted_from: float) -> None:
        """Use the GPUs, renew, give back; or forget some of it."""
        world, chance = self.world, self.world.chance
        may_end = (world.preemption and lease["demand"]["preemptible"]) or (
            world.reclaim and lease["demand"]["priority"] == "interactive"
        )
        is_long = may_end or (world.token_budgets and self.bearer is not None)
        until_s = world.now_s + chance.expovariate(0.04 if is_long and not world.calm else 0.6)
        trusted_until_s = trusted_from + lease["ttl_s"]
        temper = chance.choice(("good", "good", "good", "sleepy", "sleepy", "dies", "wrong"))
        temper = "good" if may_end else temper
        uses = self._uuids(lease, 0.2 if temper == "sleepy" else 0.8)
        pids = [(gpu, world.gpu_node(gpu).start_process(gpu, lease["id"])) for gpu in uses]
        busy = _Busy(self, lease, uses) if world.reclaim else None
        while world.now_s < until_s:
            await asyncio.sleep(min(lease["ttl_s"] / 3, max(until_s - world.now_s, 0.0)) + 0.001)
            if temper == "dies" and world.happens(0.3):
                break
            if temper == "sleepy" and world.happens(0.5):
                await asyncio.sleep(lease["ttl_s"] + chance.uniform(-0.5, 4.0))
            if busy is not None:
                await busy.go_on()
            token = lease["token"] + (1 if temper == "wrong" and world.happens(0.3) else 0)
            sent_s = world.now_s
            status = await self._act("renew", lease, token)
            if status == 200:
                trusted_until_s = sent_s + lease["ttl_s"]
            lost = status in (404, 410) or (temper != "sleepy" and world.now_s >= trusted_until_s)
            if lost:
                temper = "dies"
                break
        lag_s = chance.choice((0.0, 0.0, chance.uniform(0.0, 3.0)))
        if lag_s:
            world.spawn(self._end(pids, lag_s))
        else:
            await self._end(pids, 0.0)
        if temper != "dies":
            await self._release(lease)

    def _uuids(self, lease: Line, share: float) -> list[str]:
        return [gpu["uuid"] for gpu in lease["gpus"]] if self.world.happens(share) or self.world.calm else []

    async def _end(self, pids: list[tuple[str, int]], lag_s: float) -> None:
        await asyncio.sleep(lag_s)
        for gpu, pid in pids:
            self.world.gpu_node(gpu).gpus[gpu].processes.pop(pid, None)
            self.world.gpu_node(gpu).gpus[gpu].utilization_ratio = 0.0

    async def _act(self, verb: str, lease: Line, token: int | None) -> int:
        """Renew or release once; the status, 0 when no answer came."""
        sent_s, what = self.world.now_s, {"renew": "renewed", "release": "released"}[verb]
        known = {"lease_id": lease["id"], "token": token}
        try:
            path = f"/v1/leases/{lease['id']}/{verb}"
            status, told = await self._call("POST", path, {"token": token})
        except NoAnswer:
            self.world.lines.append({"what": what, "sent_s": sent_s, "at_s": None, **known})
            return 0
        self._told(what, sent_s, status, told, **known)
        return status

    async def _release(self, lease: Line) -> None:
        """Give back until the daemon has said so. A request that was granted in the meantime has a token by now."""
        token = lease["token"]
        while (status := await self._act("release", lease, token)) in (0, 412, 500, 503):
            await asyncio.sleep(self.world.chance.uniform(0.02, 0.3))
            if status == 412:
                sent_s = self.world.now_s
                try:
                    status, told = await self._call("GET", f"/v1/leases/{lease['id']}")
                except NoAnswer:
                    continue
                self._told("shown", sent_s, status, told, lease_id=lease["id"], trusted_from=None)
                token = told.get("token", token)


class _Busy:
    """Works on GPUs now and then, or keeps them idle on purpose, or neither."""

    def __init__(self, client: PlayedClient, lease: Line, gpus: list[str]) -> None:
        self.client, self.world, self.lease, self.gpus = client, client.world, lease, gpus
        self.works, self.keeps = self.world.chance.random() < 0.3, self.world.chance.random() < 0.3

    async def go_on(self) -> None:
        """Work, or stop working; keep them, once at most."""
        world = self.world
        for gpu in self.gpus if self.works else ():
            world.gpu_node(gpu).gpus[gpu].utilization_ratio = world.chance.choice((0.0, 0.0, 0.0, 0.5))
        if not self.keeps or not world.happens(0.1):
            return
        self.keeps = False
        sent_s, for_s = world.now_s, world.chance.uniform(2.0, 15.0)
        body = {"token": self.lease["token"], "reason": "lunch", "for_s": for_s}
        path = f"/v1/leases/{self.lease['id']}/keep"
        try:
            status, _ = await world.network.call(self.client.name, "POST", path, body, twice=False, uid=self.client.uid)
        except NoAnswer:
            return
        if status == 200:
            world.see("kept", lease_id=self.lease["id"], sent_s=sent_s, for_s=for_s)


class Administrator:
    """Takes GPUs and nodes out of use and puts them back."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self) -> None:
        """Out of use for a while, one thing after the other, until everything is calm; then all is put back."""
        chance = self.world.chance
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(0.3))
            node = chance.choice(list(self.world.nodes.values()))
            uuid = chance.choice(list(node.gpus))
            out, back = chance.choice((("cordon", "uncordon"), ("drain", "resume"), ("pause", "resume")))
            place = f"/v1/gpus/{uuid}" if out == "cordon" else f"/v1/nodes/{node.name}"
            await self._say(f"{place}/{out}", {"force": True} if out == "pause" else None)
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            await self._say(f"{place}/{back}")
        for node in self.world.nodes.values():
            if node.off:
                while await self._say(f"/v1/nodes/{node.name}/forget") not in (200, 204, 404):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                continue
            for path in (f"/v1/nodes/{node.name}/resume", *(f"/v1/gpus/{uuid}/uncordon" for uuid in node.gpus)):
                while await self._say(path) not in (200, 404):
                    self.world.step("admin tries again")

    async def _say(self, path: str, body: Line | None = None) -> int:
        try:
            return (await self.world.network.call("admin", "POST", path, body, twice=False))[0]
        except NoAnswer:
            return 0


class LimitSetter:
    """Sets and removes limits of users and of a group, while leases are held and requests wait. With `budgets` of a
    token, too, and of GPU-hours."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self) -> None:
        """One limit after the other, until everything is calm; then there are none. No single request is over one."""
        chance = self.world.chance
        places = {"user/root": [], "user/eve": [], "group/all": ["root", "eve"]}
        if self.world.budgets:
            places[f"token/{TOKEN_ID}"] = []
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(1.0))
            place = chance.choice(list(places))
            numbers: dict[str, float] = {"max_gpus": chance.randint(4, 5), "max_leases": chance.randint(1, 3)}
            chosen = dict(chance.sample(sorted(numbers.items()), chance.randint(1, 2)))
            if self.world.budgets and chance.random() < (0.2 if self.world.token_budgets else 0.7):
                chosen["gpu_hours"] = chance.choice((0.0002, 0.0005, 0.001))
                chosen["window_s"] = chance.choice((2, 5, 20)) * SHORTER
            body = {**chosen, "members": places[place]} if places[place] else chosen
            await self._say(*(("PUT", place, body) if chance.random() < 0.7 else ("DELETE", place)))
        for place in places:
            while await self._say("DELETE", place) not in (200, 404):
                self.world.step("limits are removed again")
                await asyncio.sleep(0.1)

    async def _say(self, method: str, place: str, body: Line | None = None) -> int:
        try:
            return (await self.world.network.call("admin", method, f"/v1/limits/{place}", body, twice=False))[0]
        except NoAnswer:
            return 0


class Reserver:
    """Reserves GPUs for some of the clients in windows of time, and cancels that, while leases are held."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self) -> None:
        """One reservation after the other, until everything is calm; then there are none."""
        chance = self.world.chance
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(0.2 if self.world.crowd else 5.0))
            uuids = [uuid for node in self.world.nodes.values() for uuid in node.gpus]
            when = (-1.0, 3.0) if self.world.crowd else chance.choice(((-1.0, 3.0), (295.0, 330.0)))
            begins, lasts = (timedelta(seconds=chance.uniform(*one)) for one in (when, (1.0, 6.0)))
            from_at = self.world.wall() + begins
            body = {
                "gpus": chance.sample(uuids, chance.choice((1, 1, 2))),
                "user": chance.choice(("root", "zoe")),
                "from_at": from_at.isoformat(),
                "to_at": (from_at + lasts).isoformat(),
            }
            await self._say("POST", "", body)
            if chance.random() < 0.1:
                await self._cancel_some(chance.randint(1, 3))
        while not await self._cancel_some(1000):
            self.world.step("reservations are cancelled again")
            await asyncio.sleep(0.1)

    async def _cancel_some(self, most: int) -> bool:
        """Cancel so many of them. True if there were none."""
        status, page = await self._say("GET", "")
        if status != 200:
            return False
        for entry in page["items"][:most]:
            await self._say("DELETE", f"/{entry['id']}")
        return not page["items"]

    async def _say(self, method: str, place: str, body: Line | None = None) -> tuple[int, Any]:
        try:
            return await self.world.network.call("admin", method, f"/v1/reservations{place}", body, twice=False)
        except NoAnswer:
            return 0, None


class Attacker:
    """Asks for far more than anyone may have waiting, and tries to act for others."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self) -> None:
        """One attack after the other, until everything is calm. What was asked for expires by itself."""
        chance, numbers = self.world.chance, itertools.count(1)
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(0.2))
            calls = [self._say("GET", "/v1/leases?limit=20", attacks=False)]
            for number in itertools.islice(numbers, chance.choice((0, 0, 0, 40))):
                body = {"count": 1, "ttl_s": 3.0, "label": f"eve-{number}"}
                calls.append(self._say("POST", "/v1/leases", body, key=f"eve-{number}", attacks=False))
            status, page = (await asyncio.gather(*calls))[0]
            others = [one for one in page["items"] if one["holder"]["user"] != "eve"] if status == 200 else []
            for lease in others[:3]:
                verb = chance.choice(("release", "renew"))
                await self._say("POST", f"/v1/leases/{lease['id']}/{verb}", {"token": lease["token"]})
            node = chance.choice(list(self.world.nodes))
            report = {"worker_id": "eve", "host": "eve", "problem": "eve says so"}
            await self._say("POST", f"/v1/nodes/{node}/{chance.choice(('exchange', 'forget', 'pause'))}", report)

    async def _say(self, method: str, path: str, body: Line | None = None, *, attacks: bool = True, **how: Any) -> Any:
        try:
            status, told = await self.world.network.call("eve", method, path, body, twice=False, uid=EVE, **how)
        except NoAnswer:
            return 0, None
        if attacks:
            self.world.see("attacked", call=f"{method} {path}", status=status)
        return status, told


async def follow_events(world: World) -> None:
    """Read the event log as it grows, and write down when each event was first shown."""
    last = 0
    while not world.over:
        await asyncio.sleep(world.chance.uniform(0.3, 0.9))
        try:
            status, page = await world.network.call(
                "follower", "GET", f"/v1/events?after={last}&limit=200", twice=False
            )
        except NoAnswer:
            continue
        for event in page["items"] if status == 200 else ():
            world.see("event", event=event)
            last = event["seq"]


async def watch_held_gpus(world: World) -> None:
    """Look again and again which GPUs are held for whom, and write it down. No message of it is lost."""
    headers = [(b"host", b"localhost")]
    while not world.over:
        await asyncio.sleep(world.chance.uniform(0.05, 0.15))
        if world.daemon is None:
            continue
        status, page = await request(world.app, "GET", "/v1/gpus", headers, b"", asyncio.Event())
        if status == 200:
            held = {gpu["uuid"]: gpu["reserved_for"] for gpu in page["items"] if gpu.get("reserved_for")}
            world.see("held", gpus=held)


async def watch_explanations(world: World) -> None:
    """Look again and again what some of those who wait are told of the order, and write it down if no one came or went
    meanwhile. No message of it is lost."""
    headers = [(b"host", b"localhost")]
    while not world.over:
        await asyncio.sleep(world.chance.uniform(0.05, 0.3))
        if (daemon := world.daemon) is None:
            continue
        sent_s, queue, said = world.now_s, [*daemon.parts.ledger.queue], dict[str, Line]()
        for _, lease in world.chance.sample(queue, min(6, len(queue))):
            path = f"/v1/leases/{lease}/explain"
            if world.daemon is not daemon:
                break
            status, told = await request(world.app, "GET", path, headers, b"", asyncio.Event())
            if status == 200 and told["position"] is not None:
                said[lease] = {"position": told["position"], "behind": told["behind"]}
        if said and world.daemon is daemon and queue == daemon.parts.ledger.queue:
            world.see("explained", sent_s=sent_s, said=said)


async def share_in_groups(world: World, groups: dict[str, list[str]]) -> None:
    """Make these groups, once at the beginning, and look again and again what everyone is said to have used."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]

    async def say(method: str, path: str, body: Line | None = None) -> tuple[int, Any]:
        raw = b"" if body is None else json.dumps(body).encode()
        return await request(world.app, method, path, headers, raw, asyncio.Event())

    for name, members in groups.items():
        while (await say("PUT", f"/v1/limits/group/{name}", {"members": members, "max_gpus": 100}))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    while not world.over:
        await asyncio.sleep(world.chance.uniform(0.2, 0.6))
        status, page = await say("GET", "/v1/leases?state=queued&limit=50") if world.daemon is not None else (0, None)
        waiting = {one["holder"]["user"]: one["id"] for one in page["items"]} if status == 200 else {}
        for lease in waiting.values():
            sent_s = world.now_s
            status, told = await say("GET", f"/v1/leases/{lease}/explain") if world.daemon is not None else (0, None)
            for one in told["recent_usage"] if status == 200 else ():
                known = {f"user {one['user']}": one["gpu_hours"]}
                if one.get("group") is not None:
                    known[f"group {one['group']}"] = one["group_gpu_hours"]
                for whose, hours in known.items():
                    world.see("used", whose=whose, sent_s=sent_s, used_s=hours * 3600)
