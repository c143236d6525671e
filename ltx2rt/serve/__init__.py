"""Serving: a queue that outlives what dies, one process for each replica of a model, OpenAI's video
routes, a page.

    request -> admission (resolved, on paper) -> queue (SQLite) -> supervisor -> pipe -> worker ->
    file -> queue

Nothing here imports a framework: the models live in the workers, `ltx2rt worker`.
"""
