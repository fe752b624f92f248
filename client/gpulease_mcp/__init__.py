"""`gpulease mcp`: a server of the Model Context Protocol, by which a coding agent looks at GPUs,
leases them and submits jobs.

It is a client of the daemon like any other, with the rights of the user who starts it, or of the token in
GPULEASE_TOKEN. It speaks over stdin and stdout, to one agent, for one session. What each failure does:

| what happens | what follows |
|---|---|
| the agent closes stdin, or ends | the leases of the session are released, requests are withdrawn |
| the server gets SIGTERM or SIGINT | the same |
| the server is killed (SIGKILL) | its leases end at once, or after `TTL_S` where no worker watches it |
| the agent forgets a lease while the server lives | the lease is released when its `hold_minutes` are over |
| the agent asks again after a lost answer | with the same `idempotency_key` it is the same lease or job |
| the daemon is away | a tool says so; leases stay, and are renewed as soon as it is back |
| the budget of the token is spent | the daemon ends the leases, or keeps a request waiting, and says until when |
| someone writes instructions into a job's log | the text is returned as data, in a field of its own that says so |

No tool changes limits, nodes or tokens, and none touches what another user holds, even for an administrator.
"""
