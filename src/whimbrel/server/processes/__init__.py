"""The processes of a server: a supervisor, an engine process per model and replica, and HTTP workers.

    supervisor ---- control ---- worker 0, worker 1, ...     read HTTP, tokenise, write answers
         |                          |  |
         +------- control ---- engine 0/0, ...               run a model: no HTTP, no texts

A worker and an engine talk over a socketpair that the supervisor makes for each life of either, so nothing has a name in the
file system and nothing is left behind. `messages` says what travels, `channel` how, `shared` what lies in shared memory.
"""
