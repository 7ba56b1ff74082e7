"""Prefill in one process and decode in another, with a canary in each. The command is `disaggregated_serving.py`; README.md explains it.

- `tiny`: random weights for the model of the demo `smollm2`, its sizes, and the settings that both processes share.
- `node`: one process's pool, canary and request table, and how KV and records leave it and come in.
- `frames`: the messages on the socket.
- `prefill`: the process that answers a prompt with its KV and records.
- `decode`: the process that starts the other one, puts what arrives at slots of its own, and goes on.
- `demo`: the runs, and the report that the command prints.
"""
