"""The hot path: the requests that holders and workers send all the time, without what they do not need.

To request a lease, wait for it, renew it, release it, and report for a node are nearly all that a busy daemon is asked.
Each of these is one function from the head to the answer. FastAPI and the middlewares would take three times as long:
they solve dependencies, look for a route, and pass each message on eleven times. They stay the frame of all other
routes, and of every request that is unusual.

| question | where it is answered |
|---|---|
| What may be asked, and how is it described? | `routes`: the hot path calls their functions, and OpenAPI shows them |
| Does a request take the hot path? | `hot_requests`: from its head alone, before anything of it is done or counted |
| Which part of a request needs a task? | `exchange`: one request from when it is counted to its answer |
| Who may, how often, whose turn is it, is the answer stale, what is logged? | the middlewares' and `auth`'s functions |

What must hold:

- Both ways give the same answer, byte for byte, headers included (`tests/api/test_hot_path.py`). There is no rule here
  that is not in the module that has it for all routes.
- What is not entirely ordinary falls back: an unknown query parameter, a page of a browser, a body in chunks or over
  the bound, a field that comes twice, an unusual id, a standby. So its errors are written once.
- A request that was begun here is finished here: it was counted, and may have been carried out.
"""
